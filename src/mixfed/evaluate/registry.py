"""The names of all metrics; :mod:`mixfed.evaluate.metrics` computes them."""

RECALLS = {f"recall@{k}": k for k in (1, 5, 10)}
METRICS = ("loss", "accuracy", "auc", "parity_gap", "odds_gap", *RECALLS)
