"""Clients, centre and test from files of the user's own, as a recipe names them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from mixfed.data.again import read_like
from mixfed.data.scenario import Scenario
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.build import build
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario
from tests.cli.tools import here, mixfed, refused
from tests.own.code import write_code
from tests.own.tables import by_person, table, tokenizer, write

FIELDS = 'fields = { x = ["size", "colour"], y = "animal" }'
TRAINED = """
rounds = 2
cohort = 2
[client]
epochs = 1
[central]
steps = 1
[checkpoint]
every = 1
"""


def scenario(folder: Path, data: str) -> Scenario:
    return build_scenario(toml.resolve(tomllib.loads(f'home = "{folder}"\n[data]\nsource = "files"\n{data}')))


def test_a_recipe_that_says_nothing_of_training_trains_one_epoch(tmp_path: Path) -> None:
    """The shortest recipe there is: files, and a network."""
    write(tmp_path / "a.npz", table())
    lines = ["[data]", 'source = "files"', 'clients = "a.npz"', 'client = "who"', FIELDS, "test_share = 0.2"]
    (tmp_path / "short.toml").write_text("\n".join([*lines, "[model]", 'name = "mlp"']))
    request = Request(str(tmp_path / "short.toml"), rounds=1, cohort=2)
    recipe = request.on(request.base())
    assert (recipe.client.epochs, recipe.client.steps) == (1, 0)
    assert build(recipe).run().metrics["loss"] > 0
    steps = Request(str(tmp_path / "short.toml"), ["client.steps=3"])
    assert (steps.on(steps.base()).client.epochs, steps.on(steps.base()).client.steps) == (0, 3)


@pytest.mark.parametrize("name", ["a.npz", "a.csv", "a.csv.gz", "a.parquet", "a.arrow", "a.feather", "folder"])
def test_every_kind_of_file_gives_the_same_clients(tmp_path: Path, name: str) -> None:
    given = table()
    write(tmp_path / name, given)
    found = scenario(tmp_path, f'clients = "{name}"\nclient = "who"\n{FIELDS}\ntest_share = 0.2').clients
    assert found.names is not None
    assert found.names.tolist() == [f"p{i}" for i in range(6)]
    assert found.examples == 48
    assert found.arrays["x"].dtype == np.float32
    assert found.arrays["x"].shape[1] == 1 + 3  # a number and three colours
    sizes = dict(zip(given["size"], zip(given["colour"], given["animal"], given["who"], strict=True), strict=True))
    scaling = scenario(tmp_path, f'clients = "{name}"\nclient = "who"\n{FIELDS}\ntest_share = 0.2').scaling
    assert scaling is not None
    for row, owner in enumerate(found.owners()):
        x = found.arrays["x"][row]
        colour, animal, who = sizes[round(float(x[0] * scaling.deviation["x"][0] + scaling.mean["x"][0]), 3)]
        assert ["blue", "green", "red"][int(x[1:].argmax())] == colour
        assert ["cat", "dog", "owl"][found.arrays["y"][row]] == animal
        assert found.names[owner] == who


@pytest.mark.parametrize("path", ["people", "people/*.csv"])
def test_a_file_for_each_client_or_one_file_that_is_dealt(tmp_path: Path, path: str) -> None:
    for person, rows in by_person(table()).items():
        write(tmp_path / "people" / f"{person}.csv", rows)
    write(tmp_path / "all.csv", table())
    each = scenario(tmp_path, f'clients = "{path}"\n{FIELDS}\nheld_out = 0.34')
    assert len(each.clients) == 4  # two of six people are the test
    assert len(each.test) == 20
    dealt = scenario(
        tmp_path, 'clients = "all.csv"\nfields = { y = "animal" }\ntest_share = 0.1\n[data.partition]\nclients = 3'
    )
    assert dealt.clients.sizes().tolist() == [18, 18, 18]
    assert dealt.clients.arrays["x"].shape[1] == 6 + 1 + 3  # all other columns, the people among them


def test_the_centre_is_a_file_a_share_or_some_classes(tmp_path: Path) -> None:
    for name, seed in (("all.csv", 0), ("lab.csv", 1), ("test.csv", 2)):
        write(tmp_path / name, table(seed=seed))
    start = f'clients = "all.csv"\nclient = "who"\n{FIELDS}\ntest = "test.csv"\n'
    lab = scenario(tmp_path, f'{start}central = "lab.csv"')
    assert lab.central is not None
    assert (lab.clients.examples, len(lab.central), len(lab.test)) == (60, 60, 60)
    share = scenario(tmp_path, f'{start}[data.central]\nkind = "fraction"\nfraction = 0.25').central
    assert share is not None
    assert len(share) == 15
    named = scenario(tmp_path, f'{start}[data.central]\nkind = "labels"\nclient_labels = ["cat", "owl"]')
    assert named.central is not None
    assert set(named.central.arrays["y"]) == {1}
    sides = scenario(tmp_path, f'clients = "all.csv"\nclient = "who"\n{FIELDS}\ncentral = "lab.csv"\ntest_share = 0.5')
    assert sides.like_clients["test"] is not None
    assert sides.like_clients["test"].tolist() == [True] * 30 + [False] * 30  # tested on both kinds


def test_scales_and_known_values_come_from_training_examples_alone(tmp_path: Path) -> None:
    other = table(seed=2)
    other["size"] = [1000 + size for size in other["size"]]
    other["colour"][0] = "violet"
    write(tmp_path / "all.csv", table())
    write(tmp_path / "lab.csv", table(seed=1))
    write(tmp_path / "test.csv", other)
    found = scenario(tmp_path, f'clients = "all.csv"\nclient = "who"\n{FIELDS}\ncentral = "lab.csv"\ntest = "test.csv"')
    assert found.central is not None
    together = np.concatenate([found.clients.arrays["x"], found.central.arrays["x"]])[:, 0]
    assert abs(together.mean()) < 1e-6
    assert together.std() == pytest.approx(1)
    assert (found.test.arrays["x"][:, 0] == 10).all()  # far off, and not further than ten deviations
    assert found.test.arrays["x"][0, 1:].tolist() == [0, 0, 0]  # no known colour
    other["animal"][3] = "yak"
    write(tmp_path / "test.csv", other)
    with pytest.raises(InputError, match=r"test examples have yak in 'animal' \(row 3\)"):
        scenario(tmp_path, f'clients = "all.csv"\nclient = "who"\n{FIELDS}\ntest = "test.csv"')


def test_labels_are_classes_or_measurements(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", {"x": np.ones((6, 4)).tolist(), "y": [1, 3, 3, 6, 6, 6], "who": [0, 0, 1, 1, 2, 2]})
    start = 'clients = "a.npz"\nclient = "who"\ntest = "a.npz"\n'
    assert scenario(tmp_path, start).source.classes == 7
    numbered = scenario(tmp_path, f'{start}labels = "classes"')
    assert numbered.source.names["y"] == ("1", "3", "6")
    assert numbered.clients.arrays["y"].tolist() == [0, 1, 1, 2, 2, 2]
    measured = scenario(tmp_path, f'{start}labels = "standard"').clients.arrays["y"]
    assert measured.dtype == np.float32
    assert (abs(measured.mean()) < 1e-6, round(float(measured.std()), 4)) == (True, 1.0)


def test_text_by_characters_by_a_tokenizer_and_the_next_one(tmp_path: Path) -> None:
    texts = ["the cat", "a dog", "the owl", "an owl sat"] * 3
    write(tmp_path / "said.csv", {"who": ["a", "b", "c"] * 4, "said": texts, "kind": [len(text) % 2 for text in texts]})
    tokenizer(tmp_path / "tokens.json", ["the", "cat", "owl"])
    start = 'clients = "said.csv"\nclient = "who"\ntest = "said.csv"\nlength = 5\n'
    by_letter = scenario(tmp_path, f'{start}text = "characters"\nfields = {{ x = "said", y = "kind" }}')
    assert by_letter.source.encoding is not None
    letters = by_letter.source.encoding.characters
    assert "".join(letters[n - 2] for n in by_letter.test.arrays["x"][0]) == "the c"
    assert by_letter.source.vocabulary == 2 + len(letters)
    words = scenario(tmp_path, f'{start}text = "tokens.json"\nfields = {{ x = "said", y = "kind" }}')
    assert words.test.arrays["x"][:2].tolist() == [[2, 3, 0, 0, 0], [1, 1, 0, 0, 0]]  # 0 pads, 1 is unknown
    following = scenario(tmp_path, f'{start}text = "characters"\nfields = {{ x = "said" }}').clients.arrays
    assert following["x"].shape == following["y"].shape
    assert np.array_equal(following["x"][:, 1:], following["y"][:, :-1])


def test_a_run_remembers_how_it_read_and_refuses_files_that_have_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_code(tmp_path)
    write(tmp_path / "all.csv", table())
    write(tmp_path / "test.csv", table(seed=1))
    data = f'[data]\nsource = "files"\nclients = "all.csv"\nclient = "who"\n{FIELDS}\ntest = "test.csv"\n'
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'{TRAINED}{data}[model]\nname = "net.py:Net"\nwidth = 4\n')
    run = ["run", recipe, "--executor", "loop", "--out", tmp_path / "run"]
    mixfed(*run, cwd=Path("/"))
    learnt = json.loads((tmp_path / "run" / "data.json").read_text())
    assert learnt["encoding"]["values"]["y"] == ["cat", "dog", "owl"]
    request = Request(str(recipe))
    test = build(request.on(request.base())).scenario.test.arrays
    again = read_like(tmp_path / "test.csv", learnt)
    assert all(np.array_equal(again[name], test[name]) for name in test)
    assert set(read_like(tmp_path / "test.csv", learnt, labels=False)) == {"x"}
    longer = [*run, "--resume", "--rounds", "3"]
    for file, was in ((tmp_path / n, (tmp_path / n).read_text()) for n in ("all.csv", "net.py", "layers.py")):
        file.write_text(was + "\n")
        assert f"The file {file.name} has changed since" in refused(capsys, *longer)
        assert (tmp_path / "run" / "result.json").exists(), "what was refused has left the finished run alone"
        file.write_text(was)
    here(*longer)
    here("run", recipe, "--executor", "loop", "--rounds", "3", "--out", tmp_path / "whole")
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


SOURCE = """
import numpy as np
from mixfed import CentralData, FederatedData


def load(folder, people=4, lab=True):
    x = np.loadtxt(folder / "x.txt", dtype=np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    clients = FederatedData.from_arrays({"x": x, "y": y}, np.arange(len(x)) % people)
    test = CentralData.from_arrays({"x": x + 1, "y": y})
    return {"clients": clients, "test": test} | ({"central": test} if lab else {})


def wrong():
    return [1, 2]
"""


def test_a_source_is_a_function_of_the_user_s_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    np.savetxt(tmp_path / "x.txt", np.random.default_rng(0).normal(size=(40, 3)))
    recipe = f'home = "{tmp_path}"\n{TRAINED}[data]\nsource = "mine.py:load"\n'
    found = build(toml.resolve(tomllib.loads(f"{recipe}people = 5\n")))
    assert (len(found.scenario.clients), found.scenario.source.classes) == (5, 2)
    assert found.scenario.central is not None
    assert np.isfinite(found.run().metrics["loss"])
    without = toml.resolve(tomllib.loads(f"{recipe}lab = false\n"))
    assert build_scenario(without).central is None
    with pytest.raises(InputError, match="returns a dictionary with clients"):
        build_scenario(toml.resolve(tomllib.loads(recipe.replace(":load", ":wrong"))))
