"""mixfed: learn one model from data you hold and data you cannot see."""
