"""Experiments run, are stored, merge and are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mixfed.cli import app
from mixfed.errors import InputError
from mixfed.experiments.reproduce.check import problems
from mixfed.experiments.reproduce.definition import load
from mixfed.experiments.reproduce.plan import Key, plan, tuning_request
from mixfed.experiments.reproduce.runs import missing
from mixfed.experiments.reproduce.store import Store, sealed
from mixfed.experiments.reproduce.tuning import command as tuning_command
from mixfed.experiments.request import Request
from mixfed.experiments.texts import packaged
from mixfed.experiments.tune import grids, points
from tests.results.tiny import TINY, tiny, write

FIGURES = {"FedAvg": [0.4, 0.42], "Oracle": [0.5, 0.521]}


def command(*words: str) -> str:
    done = CliRunner().invoke(app, ["reproduce", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_two_parts_make_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, store = tiny(tmp_path), Store(tmp_path / "results")
    command(str(path), "--only", "FedAvg", "--threads", "1", "--set", "simulator.executor=loop")
    assert {key.label for key in store.read("tiny").runs} == {"FedAvg"}
    assert store.read("tiny").claims[0]["verdict"] == "not tried here"
    first = store.read("tiny").runs
    told = command(str(path), "--seeds", "1", "--cells", "fast")
    assert "50.0" not in told
    assert "0.500" in told
    assert len(store.read("tiny").runs) == 5
    command(str(path))
    stored = store.read("tiny")
    assert len(stored.runs) == 8
    assert {key: stored.runs[key] for key in first} == first  # what was stored is not run again
    record = stored.runs[Key("FedAvg", "slow", 0)]
    assert record["executor"] == "loop"
    assert record["metrics"]["round"] == [2, 4]
    assert record["ledger"]["bytes_up"] > 0
    assert problems(store, None, str(path)) == []


def test_a_run_that_another_experiment_has_stored_is_taken_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command(str(tiny(tmp_path)), "--only", "FedAvg", "--cells", "fast", "--set", "simulator.executor=loop")
    other = tiny(
        tmp_path, TINY.replace('label = "FedAvg"', 'label = "mean"').replace('["FedAvg"]', '["mean"]'), "other"
    )
    monkeypatch.setattr("mixfed.experiments.reproduce.perform.train_all", None)  # nothing may be trained
    command(str(other), "--only", "mean", "--cells", "fast")
    store = Store("results")
    ours, theirs = store.read("other").runs, store.read("tiny").runs
    assert list(ours) == [Key("mean", "fast", 0), Key("mean", "fast", 1)]
    for key, record in ours.items():
        source = theirs[Key("FedAvg", "fast", key.seed)]
        assert record["metrics"] == source["metrics"]
        assert record["taken_from"] == "tiny"
        assert "taken_from" not in source
    assert problems(store, None, str(other)) == []


def test_a_run_is_what_its_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tiny(tmp_path)
    command(str(path), "--only", "FedAvg", "--seeds", "1", "--cells", "slow", "--set", "simulator.executor=loop")
    record = Store("results").read("tiny").runs[Key("FedAvg", "slow", 1)]
    import shlex

    words = shlex.split(record["command"])[1:]
    done = CliRunner().invoke(app, [*words, "--out", "again", "--executor", "loop"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in Path("again/metrics.jsonl").read_text().splitlines()]
    assert [f"{line['accuracy']:.5g}" for line in lines] == [f"{v:.5g}" for v in record["metrics"]["accuracy"]]


def test_what_an_algorithm_tells_of_itself_is_stored_as_means_over_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = TINY.replace("oracle", "feddle") + 'metric = "diagnostics.negative_share"\n'
    path = tiny(tmp_path, text)
    command(str(path), "--seeds", "0", "--cells", "fast", "--out", "runs")
    runs = Store("results").read("tiny").runs
    assert "diagnostics" not in runs[Key("FedAvg", "fast", 0)]
    told = runs[Key("Oracle", "fast", 0)]["diagnostics"]
    file = next(Path("runs").rglob("diagnostics.jsonl"))
    shares = [json.loads(line)["negative_share"] for line in file.read_text().splitlines()]
    assert told["negative_share"] == pytest.approx(sum(shares) / len(shares), rel=1e-4)
    assert "round" not in told
    assert problems(Store("results"), None, str(path)) == []


def test_settings_are_chosen_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = TINY.replace('paper = {"accuracy @ fast" = 0.5}', "") + "\n[tune]\ntrials = 2\nrounds = 8\ncell = 'fast'\n"
    text = text.replace('algorithm = "fedavg"', 'algorithm = "fedavg"\ngrid = {"server.learning_rate" = [0.001, 1.0]}')
    path = tiny(tmp_path, text.replace('evaluate.every=2"', 'evaluate.every=2", "data.validation=0.1"'))
    command(str(path), "--seeds", "0", "--cells", "fast")
    store = Store("results")
    found = store.read("tiny").tuning["FedAvg"]
    assert found["chosen"] == {"server.learning_rate": 1.0}
    assert len(found["trials"]) == 2
    assert found["at_edge"] == []
    assert "server.learning_rate=1.0" in store.read("tiny").runs[Key("FedAvg", "fast", 0)]["command"]
    assert problems(store, None, str(path)) == []
    edited = json.loads(store.path("tiny").read_text())
    edited["tuning"][0] = sealed(edited["tuning"][0] | {"chosen": {"server.learning_rate": 0.001}})
    store.path("tiny").write_text(json.dumps(edited))
    assert any("not the best of its trials" in problem for problem in problems(store, None, str(path)))


def test_trials_have_the_rounds_of_the_experiment_unless_told(tmp_path: Path) -> None:
    text = TINY.replace('algorithm = "fedavg"', 'algorithm = "fedavg"\ngrid = {"server.learning_rate" = [0.5, 1.0]}')
    for more, rounds in (("", "--rounds 4"), ("rounds = 3\n", "--rounds 3")):
        definition = load(str(tiny(tmp_path, f"{text}\n[tune]\ntrials = 2\n{more}")))
        method = definition.method("FedAvg")
        assert tuning_request(definition, method).options["rounds"] == int(rounds.split()[1])
        assert rounds in tuning_command(definition, method)


def _edit(table: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split("/")
    node: Any = table
    for part in above:
        node = node[int(part) if part.isdigit() else part]
    node[int(last) if last.isdigit() else last] = value


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("runs/0/metrics/accuracy/1", 0.99, "was edited"),
        ("runs/0/seconds", "long", "'seconds' is missing or of another kind"),
        ("runs/0/fingerprint", "0" * 16, "was edited"),
        ("runs/0/environment", "nowhere", "was edited"),
        ("claims/0/verdict", "does not hold", "do not follow from its numbers"),
        ("format", 7, "has the format 7"),
        ("experiment", "other", "is of the experiment 'other'"),
        ("runs", {}, "'runs' is missing or of another kind"),
    ],
)
def test_what_was_edited_is_noticed(tmp_path: Path, path: str, value: Any, told: str) -> None:
    store, file = Store(tmp_path / "results"), tiny(tmp_path)
    write(store, file, FIGURES)
    assert problems(store, None, str(file)) == []
    table = json.loads(store.path("tiny").read_text())
    _edit(table, path, value)
    store.path("tiny").write_text(json.dumps(table))
    found = problems(store, None, str(file))
    assert len(found) == 1, found
    assert told in found[0]


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    store, file = Store(tmp_path / "results"), tiny(tmp_path)
    write(store, file, FIGURES)
    store.path("tiny").write_text(store.path("tiny").read_text()[:-40])
    assert "is damaged" in problems(store, None, str(file))[0]
    done = CliRunner().invoke(app, ["reproduce", str(file), "--store", str(store.folder)])
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def test_other_settings_are_other_runs(tmp_path: Path) -> None:
    store, file = Store(tmp_path / "results"), tiny(tmp_path)
    write(store, file, FIGURES)
    tiny(tmp_path, TINY.replace("rounds = 4", "rounds = 6"))
    found = problems(store, None, str(file))
    assert len(found) == 8
    assert all("other settings" in problem for problem in found)
    assert len(missing(load(str(file)), store.read("tiny"))) == 8


def test_a_fingerprint_leaves_out_what_changes_no_number(tmp_path: Path) -> None:
    first = [run.fingerprint() for run in plan(load(str(tiny(tmp_path))), {})]
    other = TINY.replace('title = "Digits', 'title = "More digits').replace(
        '"evaluate.every=2"', '"evaluate.every=2", "simulator.threads=2"'
    )
    assert [run.fingerprint() for run in plan(load(str(tiny(tmp_path, other))), {})] == first
    assert len(set(first)) == len(first)


def test_numbers_are_merged_by_whoever_writes_last(tmp_path: Path) -> None:
    store, file = Store(tmp_path / "results"), tiny(tmp_path)
    definition = write(store, file, FIGURES)
    whole = store.read("tiny")
    keys = list(whole.runs)
    store.path("tiny").unlink()
    for part in (keys[::2], keys[1::2]):
        for key in part:
            environment = {"torch": "2.13.0"}
            store.update("tiny", lambda s, r=whole.runs[key], e=environment: s.with_run(r, e), keys)  # type: ignore[misc]
    assert store.read("tiny").runs == whole.runs
    assert [path.name for path in store.folder.iterdir()] == ["tiny.json"]  # no lock is left behind
    assert definition.name == "tiny"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("title =", "titel ="), "there is no key 'titel'; did you mean 'title'"),
        (('recipe = "digits"', ""), "'recipe' is missing"),
        (('ahead = ["Oracle"]', 'ahead = ["Orakel"]'), "no runs 'Orakel'; did you mean 'Oracle'"),
        (('ahead = ["Oracle"]', 'ahead = ["Oracle"]\nnear = ["Oracle"]'), "has one of the keys ahead, near and order"),
        (('of = ["FedAvg"]', ""), "says 'of' what it is"),
        (('label = "fast"', 'label = "Slow"'), "have the same label"),
        (('label = "Oracle"', 'label = "Oracle @ home"'), "have none of"),
        (('algorithm = "oracle"', ""), "needs an algorithm"),
        (("accuracy @ fast", "accuracy @ faster"), "has no cell 'faster'"),
        (("seeds = [0, 1]", 'seeds = ["a"]'), "'seeds' takes a whole number"),
    ],
)
def test_bad_definitions_are_refused_in_a_sentence(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    path = tiny(tmp_path, TINY.replace(*change))
    with pytest.raises(InputError, match="not well formed") as error:
        load(str(path))
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["digit"], "There is no experiment 'digit'; did you mean 'digits'"),
        (["digits", "--only", "FedAvgg"], "has no runs 'FedAvgg'; did you mean 'FedAvg'"),
        (["digits", "--seeds", "7"], "has the seeds 0, 1, 2, not 7"),
        (["digits", "--cells", "x"], "has no cell 'x'"),
        (["digits", "--set", "rounds=3"], "are those of its definition"),
        (["--pages", "nowhere"], "There is no folder nowhere"),
    ],
)
def test_bad_commands_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["reproduce", *words])
    assert done.exit_code == 2
    assert told in " ".join(done.output.split())


def test_the_list_says_what_is_missing_and_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    told = command()
    assert "digits" in told
    assert "would take about" in told


@pytest.mark.parametrize("name", list(packaged("reproductions")))
def test_packaged_experiments_are_complete(name: str) -> None:
    definition = load(name)
    runs = plan(definition, {})
    assert len({run.folder() for run in runs}) == len(runs)
    for run in {run.key.label: run for run in runs}.values():
        recipe = run.recipe()
        assert recipe.seed == run.key.seed
    for method in definition.runs:
        if method.grid and definition.tune is not None:
            assert len(points(method.grid)) >= definition.tune.trials
            base = Request(method.recipe or definition.recipe).base()
            own = grids(base, [method.algorithm])[method.algorithm]
            assert set(own) <= set(method.grid), "'mixfed tune' would try those of the recipe as well"
