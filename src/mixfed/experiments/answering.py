"""``mixfed predict``: what the trained network of a run answers to the examples in a file."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mixfed.core.batches import gather
from mixfed.data.again import as_measured, read_like
from mixfed.data.columns import read_columns
from mixfed.data.prepare import Pixels
from mixfed.data.store import CentralData
from mixfed.errors import InputError, explained
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.report.files import write_text
from mixfed.experiments.using import load

AT_ONCE = 1024


def predict_file(
    run: str | Path, file: str | Path, out: str | Path | None = None, *, client: int | None = None
) -> Path:
    """Writes a CSV with a row for each example of the file: the answer, and how sure the network is of a class.

    A run of files reads this one as it read them (the same columns, words and scale; labels are not needed). For other
    runs the file has a field ``x`` as the network takes it. Returns where the answers are.
    """
    folder, file = RunFolder(run), Path(file)
    network = load(run, client=client)
    learnt = json.loads(folder.data.read_bytes()) if folder.data.is_file() else None
    data, names = _examples(folder, file, learnt)
    found = []
    for start in range(0, len(data), AT_ONCE):
        batch = gather(data, np.arange(start, min(start + AT_ONCE, len(data))))
        with torch.no_grad(), explained(f"The network of {folder.path} cannot answer the examples in {file}"):
            found.append(network(batch["x"]))
    target = Path(out) if out else file.with_name(f"{file.name.split('.')[0]}-answers.csv")
    outputs = torch.cat(found)
    if learnt is not None:
        outputs = torch.from_numpy(as_measured(outputs.numpy(), learnt))
    write_text(target, _table(outputs, folder.stored().model.criterion, names))
    return target


def _examples(folder: RunFolder, file: Path, learnt: dict[str, Any] | None) -> tuple[CentralData, list[str]]:
    """The examples as the network takes them, and the names of its classes."""
    facts = folder.known_facts()
    names = facts.get("confusion", {}).get("labels", [])
    if learnt is not None:
        arrays = read_like(file, learnt, labels=False)
        names = [str(value) for value in learnt["encoding"]["values"].get("y", [])] or names
    else:
        arrays = read_columns(file, ["x"])
    wanted = facts.get("network", {}).get("input")
    if wanted is None:
        raise InputError(f"The network of the run in {folder.path} takes more than one field; ask it in Python.")
    pixels = arrays["x"].dtype == np.uint8 and arrays["x"].ndim == 4
    if not pixels and list(arrays["x"].shape[1:]) != wanted["shape"]:
        shape = list(arrays["x"].shape[1:])
        raise InputError(f"An example in {file} has the shape {shape}, and the network takes {wanted['shape']}.")
    if not pixels:
        arrays = {"x": arrays["x"].astype(wanted["dtype"])}
    return CentralData({"x": arrays["x"]}, Pixels() if pixels else None), names


def _table(outputs: Tensor, criterion: str, names: list[str]) -> str:
    """Answers as CSV: classes by their names with a probability, or the numbers that the network gives.

    A criterion of the user's own may not be of probabilities; where there is an output for each of the classes, the
    answer is the class of the largest, as accuracy has it.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    one = outputs.reshape(len(outputs), -1)
    chances = criterion in ("cross_entropy", "binary_cross_entropy")
    if not chances and not 1 < one.shape[1] == len(names):
        rows.writerow(["answer"] if one.shape[1] == 1 else [f"answer_{i}" for i in range(one.shape[1])])
        rows.writerows([[f"{value:.6g}" for value in row] for row in one.tolist()])
        return text.getvalue()
    logits = torch.cat([torch.zeros_like(one), one], 1) if criterion == "binary_cross_entropy" else one
    largest, answer = (logits.softmax(1) if chances else logits).max(1)
    rows.writerow(["answer", "probability" if chances else "output"])
    for place, value in zip(answer.tolist(), largest.tolist(), strict=True):
        rows.writerow([_name(names, place), f"{value:.4f}" if chances else f"{value:.6g}"])
    return text.getvalue()


def _name(names: list[Any], place: int) -> Any:
    return names[place] if place < len(names) else place
