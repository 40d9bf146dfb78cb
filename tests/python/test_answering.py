"""``mixfed predict``: a file without labels is read as the run read its own, and gets the network's answers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import mixfed
from mixfed.data.again import read_like
from tests.cli.tools import here, refused

RECIPE = """
rounds = 20
cohort = 4
[data]
source = "files"
clients = "shops.csv"
client = "shop"
fields = { x = ["size", "colour"], y = "fruit" }
test = "test.csv"
[model]
name = "mlp"
hidden = [8]
[client]
learning_rate = 0.3
batch_size = 4
steps = 4
[simulator]
executor = "loop"
"""


def write(file: Path, rows: int, seed: int, *, labels: bool = True) -> list[str]:
    """Small red cherries and large green melons; what each is."""
    draw = np.random.default_rng(seed)
    kinds = draw.integers(0, 2, rows)
    names = [("cherry", "melon")[kind] for kind in kinds]
    with file.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["shop", "size", "colour", *(["fruit"] if labels else [])])
        for i, kind in enumerate(kinds):
            size = draw.normal(2 + 18 * kind, 1)
            table.writerow([f"s{i % 5}", f"{size:.2f}", ("red", "green")[kind], *([names[i]] if labels else [])])
    return names


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answering")
    write(folder / "shops.csv", 60, 0)
    write(folder / "test.csv", 20, 1)
    (folder / "fruit.toml").write_text(RECIPE)
    here("run", folder / "fruit.toml", "--out", folder / "run")
    return folder


def test_a_file_without_labels_is_answered(trained: Path) -> None:
    true = write(trained / "new.csv", 15, 2, labels=False)
    here("predict", trained / "run", "--data", trained / "new.csv")
    with (trained / "new-answers.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["answer"] for row in rows] == true
    assert all(0.5 < float(row["probability"]) <= 1 for row in rows)


def sizes(folder: Path) -> Path:
    """A recipe for a size, which is brought to mean 0 and deviation 1."""
    recipe = RECIPE.replace('["size", "colour"], y = "fruit"', '"colour", y = "size"').replace("[8]", "[8]\nMORE")
    more = 'criterion = "squared_error"\n[evaluate]\nmetrics = ["loss"]'
    recipe = recipe.replace('test = "test.csv"', 'test = "test.csv"\nlabels = "standard"').replace("MORE", more)
    (folder / "sizes.toml").write_text(recipe)
    return folder / "sizes.toml"


def test_measurements_are_answered_in_their_own_unit(trained: Path) -> None:
    here("run", sizes(trained), "--out", trained / "sizes")
    true = write(trained / "new.csv", 15, 2, labels=False)
    here("predict", trained / "sizes", "--data", trained / "new.csv", "--out", trained / "sizes.csv")
    with (trained / "sizes.csv").open() as stream:
        answers = [float(row["answer"]) for row in csv.DictReader(stream)]
    assert answers == pytest.approx([20 if name == "melon" else 2 for name in true], abs=1.5)


@pytest.mark.parametrize("of", ["classes", "measurements"])
def test_python_answers_as_the_command_does(of: str, trained: Path, tmp_path: Path) -> None:
    recipe, run, new = trained / "fruit.toml" if of == "classes" else sizes(trained), tmp_path / "run", "new.csv"
    result = mixfed.train(str(recipe), out=run, progress=False)
    write(tmp_path / new, 15, 3, labels=False)
    here("predict", run, "--data", tmp_path / new, "--out", tmp_path / "answers.csv")
    with (tmp_path / "answers.csv").open() as stream:
        told = [row["answer"] for row in csv.DictReader(stream)]
    x = read_like(tmp_path / new, json.loads((run / "data.json").read_bytes()), labels=False)["x"]
    for answers in (result.predict(x), mixfed.predict(run, x), mixfed.predict(run, tmp_path / new)):
        assert [a if isinstance(a, str) else f"{a:.6g}" for a in answers.flatten().tolist()] == told
    with torch.no_grad():
        outputs = mixfed.load(run)(torch.from_numpy(x))
    assert torch.equal(result.predict(x, raw=True), outputs)
    assert torch.equal(mixfed.predict(run, tmp_path / new, raw=True), outputs)


@pytest.mark.parametrize("of", ["classes", "measurements"])
def test_a_run_of_before_its_meaning_was_written_down_answers_the_same(of: str, trained: Path, tmp_path: Path) -> None:
    recipe, run = trained / "fruit.toml" if of == "classes" else sizes(trained), tmp_path / "run"
    here("run", recipe, "--rounds", "2", "--out", run)
    write(tmp_path / "new.csv", 15, 3, labels=False)
    before = mixfed.predict(run, tmp_path / "new.csv").tolist()
    facts = json.loads((run / "facts.json").read_bytes())
    del facts["answers"]
    (run / "facts.json").write_text(json.dumps(facts))
    assert mixfed.predict(run, tmp_path / "new.csv").tolist() == before


def test_a_network_that_answers_at_every_position_has_no_answer_for_a_text(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = 'x = ["size", "colour"], y = "fruit" }'
    recipe = RECIPE.replace(fields, 'x = "colour" }\ntext = "characters"\nlength = 4')
    (trained / "next.toml").write_text(recipe.replace('"mlp"\nhidden = [8]', '"gru"\nhidden = 8'))
    here("run", trained / "next.toml", "--rounds", "1", "--out", tmp_path / "run")
    assert "every position" in refused(capsys, "predict", tmp_path / "run", "--data", trained / "test.csv")


def test_what_a_network_cannot_be_asked(trained: Path) -> None:
    here("run", trained / "fruit.toml", "--rounds", "1", "--out", trained / "asked")
    for data, told in (({"y": [1]}, "takes a field x"), ([[0.0]], "has the shape"), (np.zeros((0, 3)), "no examples")):
        with pytest.raises(mixfed.InputError, match=told):
            mixfed.predict(trained / "asked", data)


def test_classes_are_called_by_their_names_in_results(trained: Path, tmp_path: Path) -> None:
    (trained / "names.toml").write_text(RECIPE + '[evaluate]\nmetrics = ["accuracy", "class_accuracy"]\n')
    here("run", trained / "names.toml", "--out", tmp_path / "run", "--rounds", "2")
    names = {"class_accuracy.cherry", "class_accuracy.melon"}
    assert set(json.loads((tmp_path / "run" / "result.json").read_bytes())["metrics"]) == {"accuracy", *names}
    assert all(name in (tmp_path / "run" / "report.html").read_text() for name in names)


def test_with_a_criterion_of_ones_own_the_largest_output_is_the_answer(trained: Path) -> None:
    (trained / "margin.py").write_text(
        "from torch.nn import functional as F\n\n\ndef margin(outputs, batch):\n"
        "    return F.multi_margin_loss(outputs, batch['y'], reduction='none')\n"
    )
    (trained / "margin.toml").write_text(RECIPE.replace("[8]", '[8]\ncriterion = "margin.py:margin"'))
    here("run", trained / "margin.toml", "--out", trained / "margin")
    true = write(trained / "new.csv", 15, 2, labels=False)
    here("predict", trained / "margin", "--data", trained / "new.csv", "--out", trained / "margins.csv")
    with (trained / "margins.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["answer"] for row in rows] == true
    assert all(float(row["output"]) for row in rows)


def test_what_cannot_be_answered(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.csv").write_text("shop,size\ns1,3\n")
    assert "colour" in refused(capsys, "predict", trained / "run", "--data", tmp_path / "wrong.csv")
    assert "holds no finished run" in refused(capsys, "predict", tmp_path, "--data", tmp_path / "wrong.csv")
    assert "own" in refused(capsys, "predict", trained / "run", "--data", trained / "new.csv", "--client", "1")


def test_other_runs_take_a_field_x(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here("run", "digits", "--rounds", "1", "--executor", "loop", "--out", tmp_path / "run")
    x = np.random.default_rng(0).random((4, 64), np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    here("predict", tmp_path / "run", "--data", tmp_path / "x.npz", "--out", tmp_path / "answers.csv")
    with (tmp_path / "answers.csv").open() as stream:
        answers = [int(row["answer"]) for row in csv.DictReader(stream)]
    assert answers == mixfed.load(tmp_path / "run")(torch.from_numpy(x)).argmax(1).tolist()
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 65), np.float32))
    assert "[65]" in refused(capsys, "predict", tmp_path / "run", "--data", tmp_path / "wide.npz")
