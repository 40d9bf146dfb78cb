"""Feddle: the search of coefficients, the atlas that it searches in, what guides it, and where it begins."""
