"""What the trained network of a run answers to other examples: ``mixfed predict``, and the same in Python."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mixfed.core.batches import gather
from mixfed.core.predict import as_data, classes, meant
from mixfed.core.registry import CRITERIA
from mixfed.data.again import read_like
from mixfed.data.batch import Criterion
from mixfed.data.columns import read_columns
from mixfed.data.meaning import Meaning
from mixfed.data.prepare import Pixels
from mixfed.data.scaling import Scaling
from mixfed.data.store import CentralData
from mixfed.errors import InputError, explained
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.report.files import write_text
from mixfed.experiments.using import load

AT_ONCE = 1024


def predict(
    folder: str | Path,
    data: Any,
    *,
    client: int | None = None,
    network: nn.Module | None = None,
    best: bool = False,
    raw: bool = False,
) -> Tensor | NDArray[np.str_]:
    """What the network of a finished run answers to ``data``, as ``mixfed predict`` does.

    ``data`` is a file, which is read as the run read its own, or an array of examples as the network takes them. The
    answers are names of classes, or measurements in the unit of the run's files; with ``raw`` they are the outputs of
    the network. ``client``, ``network`` and ``best`` are those of :func:`mixfed.load`.
    """
    run = RunFolder(folder)
    outputs = _outputs(run, load(folder, client=client, network=network, best=best), data)
    return outputs if raw else meant(outputs, _criterion(run), _meaning(run))


def predict_file(
    folder: str | Path, file: str | Path, out: str | Path | None = None, *, client: int | None = None
) -> Path:
    """Writes a CSV with a row for each example of the file: the answer, and how sure the network is of a class.

    A run of files reads this one as it read them (the same columns, words and scale; labels are not needed). For other
    runs the file has a field ``x`` as the network takes it. Returns where the answers are.
    """
    run, file = RunFolder(folder), Path(file)
    outputs = _outputs(run, load(folder, client=client), file)
    target = Path(out) if out else file.with_name(f"{file.name.split('.')[0]}-answers.csv")
    write_text(target, _table(outputs, _criterion(run), _meaning(run)))
    return target


def _outputs(run: RunFolder, network: nn.Module, data: Any) -> Tensor:
    """What the network gives for each example."""
    of_file = isinstance(data, str | Path)
    told = f"the examples in {data}" if of_file else "these examples"
    examples = _as_taken(run, _in_file(run, Path(data)) if of_file else as_data(data), told)
    if not len(examples):
        raise InputError("There are no examples to answer; give at least one.")
    found = []
    for start in range(0, len(examples), AT_ONCE):
        batch = gather(examples, np.arange(start, min(start + AT_ONCE, len(examples))))
        with torch.no_grad(), explained(f"The network of {run.path} cannot answer {told}"):
            found.append(network(batch["x"]))
    outputs = torch.cat(found)
    if outputs.ndim > 2 and run.stored().model.criterion == "cross_entropy":
        raise InputError(
            f"The network of {run.path} has an answer for every position of a text, not one for an example; ask it in"
            " Python, with mixfed.load."
        )
    return outputs


def _in_file(run: RunFolder, file: Path) -> CentralData:
    learnt = _learnt(run)
    arrays: Mapping[str, NDArray[Any]]
    arrays = read_columns(file, ["x"]) if learnt is None else read_like(file, learnt, labels=False)
    pixels = arrays["x"].dtype == np.uint8 and arrays["x"].ndim == 4
    return CentralData({"x": arrays["x"]}, Pixels() if pixels else None)


def _as_taken(run: RunFolder, data: CentralData, told: str) -> CentralData:
    """The examples in the shape and precision that the network takes."""
    wanted = run.known_facts().get("network", {}).get("input")
    if wanted is None:
        raise InputError(f"The network of the run in {run.path} takes more than one field; ask it in Python.")
    if "x" not in data.arrays:
        raise InputError(f"The network of the run in {run.path} takes a field x, and {told} have none.")
    if data.prepare is not None:
        return data
    x = data.arrays["x"]
    if list(x.shape[1:]) != wanted["shape"]:
        raise InputError(
            f"One of {told} has the shape {list(x.shape[1:])}, and the network of {run.path} takes {wanted['shape']}."
        )
    return CentralData({"x": x.astype(wanted["dtype"])})


def _learnt(run: RunFolder) -> dict[str, Any] | None:
    return json.loads(run.data.read_bytes()) if run.data.is_file() else None


def _meaning(run: RunFolder) -> Meaning:
    """What answers stand for; runs of before this was written down have it in two other places."""
    facts = run.known_facts()
    if "answers" in facts:
        return Meaning.from_json(facts["answers"])
    learnt = _learnt(run) or {"encoding": {"values": {}}, "scaling": None}
    names = learnt["encoding"]["values"].get("y") or facts.get("confusion", {}).get("labels", [])
    scaling = Scaling.from_json(learnt["scaling"] or {"mean": {}, "deviation": {}})
    scale = [float(part.get("y", plain)) for part, plain in ((scaling.mean, 0.0), (scaling.deviation, 1.0))]
    return Meaning(len(names) or None, tuple(map(str, names)), *scale)


def _criterion(run: RunFolder) -> Criterion | None:
    """The criterion of the run; None for one of the user's own, whose file need not be there any more."""
    name = run.stored().model.criterion
    return CRITERIA[name].load() if name in CRITERIA else None


def _table(outputs: Tensor, criterion: Criterion | None, meaning: Meaning) -> str:
    """Answers as CSV: classes with a probability (of a criterion that has some), or the numbers that they are."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    found, one = classes(outputs, criterion, meaning), outputs.reshape(len(outputs), -1)
    if found is None:
        rows.writerow(["answer"] if one.shape[1] == 1 else [f"answer_{i}" for i in range(one.shape[1])])
        rows.writerows([[f"{value:.6g}" for value in row] for row in meaning.measured(one).tolist()])
        return text.getvalue()
    chances = criterion is not None
    logits = torch.cat([torch.zeros_like(one), one], 1) if one.shape[1] == 1 else one
    largest = (logits.softmax(1) if chances else logits).amax(1)
    rows.writerow(["answer", "probability" if chances else "output"])
    for number, value in zip(found.tolist(), largest.tolist(), strict=True):
        rows.writerow([meaning.name(number), f"{value:.4f}" if chances else f"{value:.6g}"])
    return text.getvalue()
