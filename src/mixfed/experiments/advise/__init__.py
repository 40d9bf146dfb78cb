"""Which method should I use? Looks at who holds what, then tries."""
