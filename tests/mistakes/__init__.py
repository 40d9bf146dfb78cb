"""What users do wrong, and what each of them gets: one table, which the tests go through and a page of docs shows."""
