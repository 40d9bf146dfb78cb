"""A trial of the whole package by somebody who means no good: random cases, each of which can be repeated.

``python -m tests.adversarial --minutes 60`` runs it; docs/testing.md says what it tries and how to read it.
"""
