"""The names of all metrics; :mod:`mixfed.evaluate.metrics` computes them."""

RECALLS = {f"recall@{k}": k for k in (1, 5, 10)}
OF_CLASSES = ("f1", "calibration_error", "class_accuracy")
METRICS = ("loss", "accuracy", "auc", *OF_CLASSES, "parity_gap", "odds_gap", *RECALLS)
