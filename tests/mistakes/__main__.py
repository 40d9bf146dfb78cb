"""``python -m tests.mistakes`` writes the table of docs/mistakes.md anew."""

from .test_mistakes import PAGE, TABLE, rows

if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(TABLE[0])
    _, _, after = rest.partition(TABLE[1])
    PAGE.write_text(f"{before}{TABLE[0]}\n{rows()}{TABLE[1]}{after}")
