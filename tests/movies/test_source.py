"""MovieLens from tiny files in the formats of the real ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from mixfed.data import load_source
from mixfed.data.sources.movielens import in_time
from mixfed.errors import InputError
from mixfed.experiments.build import build
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.toml import load, override, resolve

LINES = [(7, 30, 100), (2, 5, 11), (7, 10, 50), (7, 20, 75), (2, 6, 10), (2, 9, 12), (2, 8, 9), (9, 1, 1), (9, 2, 2)]
"""Person, movie and time; person 9 has too few ratings."""


def write(file: Path, between: str, lines: list[tuple[int, int, int]] = LINES, compress: bool = False) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(between.join(map(str, (user, movie, 4, time))) + "\n" for user, movie, time in lines)
    if compress:
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text)


@pytest.mark.parametrize(
    ("source", "file", "between", "compress"),
    [
        ("movielens", "ml-1m/ratings.dat", "::", False),
        ("movielens", "movielens/ratings.dat", "::", True),
        ("movielens-100k", "ml-100k/u.data", "\t", False),
        ("movielens-100k", "movielens/ml-100k_u.data", "\t", True),
    ],
)
def test_windows_in_time_order(source: str, file: str, between: str, compress: bool, tmp_path: Path) -> None:
    write(tmp_path / file, between, compress=compress)
    found = load_source(source, tmp_path, history=2)
    # Person 2 rated 8, 6, 5, 9 and person 7 rated 10, 20, 30; ids start at 0.
    assert found.train["x"].tolist() == [[-1, 7], [7, 5], [5, 4], [-1, 9], [9, 19]]
    assert found.train["y"].tolist() == [5, 4, 8, 19, 29]
    assert found.natural_clients is not None
    assert found.natural_clients["train"].tolist() == [2, 2, 2, 7, 7]
    assert found.classes == (3952 if source == "movielens" else 1682)
    assert "redistributed" in found.licence


def test_npz_with_unknown_times_and_the_last_movie(tmp_path: Path) -> None:
    (tmp_path / "movielens").mkdir()
    users, movies = np.array([1, 1, 1, 1, 1]), np.array([11, 12, 13, 14, 15])
    times = np.array([30, 0, 20, 0, 10])
    np.savez(
        tmp_path / "movielens" / "ml-1m_ratings.npz",
        user_id=users, movie_id=movies, timestamp=times, last_movie_id=np.array([12]),
    )  # fmt: skip
    train = load_source("movielens", tmp_path, history=1).train
    # 12 is known to be the last; 11, 13, 15 have times 30, 20, 10 and swap places; 14 keeps its place before the last.
    assert [*train["x"][:, 0] + 1, int(train["y"][-1]) + 1] == [15, 13, 14, 11, 12]


GOOD = {
    "user_id": np.array([1, 1, 1, 2, 2, 2]),
    "movie_id": np.array([11, 12, 13, 14, 15, 16]),
    "timestamp": np.array([1, 2, 3, 4, 5, 6]),
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"last_movie_id": np.array([12])}, "users up to 2, and last_movie_id has 1 entries"),
        ({"last_movie_id": np.array(["a", "b"])}, "'last_movie_id' in .* must be a list of numbers"),
        ({"timestamp": np.array([1, 2])}, "6 of user_id, 6 of movie_id, 2 of timestamp"),
        ({n: np.zeros(0, np.int64) for n in GOOD}, "'user_id' in .* must be a list of numbers, and it is \\[0\\]"),
        ({"movie_id": np.array(list("abcdef"))}, "'movie_id' in .* must be a list of numbers"),
        ({"movie_id": np.ones((6, 2), np.int64)}, "must be a list of numbers, and it is \\[6, 2\\]"),
        ({"user_id": np.array([0, 0, 0, 1, 1, 1])}, "numbered from 1, and the file has 0"),
        ({"timestamp": np.array([1, 2, 3, 4, 5, np.nan])}, "'timestamp' in .* must hold whole numbers"),
        ({"movie_id": np.array([1, 2, 3, 4, 5, 6.5])}, "'movie_id' in .* must hold whole numbers"),
    ],
)
def test_an_npz_that_is_not_as_it_should_be(change: dict[str, np.ndarray], told: str, tmp_path: Path) -> None:
    (tmp_path / "movielens").mkdir()
    np.savez(tmp_path / "movielens" / "ml-1m_ratings.npz", **GOOD | change)
    with pytest.raises(InputError, match=told):
        load_source("movielens", tmp_path)


def test_order_without_any_time_is_the_order_of_the_file() -> None:
    users, movies = np.array([2, 1, 2, 1]), np.array([5, 6, 7, 8])
    assert in_time(users, movies, np.zeros(4, np.int64)).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("lines", "told"),
    [([(1, 1683, 5)], "numbered 1 to 1682, and the file has 1683"), ([(1, 0, 5)], "numbered 1 to 1682")],
)
def test_movies_out_of_range(lines: list[tuple[int, int, int]], told: str, tmp_path: Path) -> None:
    write(tmp_path / "ml-100k" / "u.data", "\t", lines)
    with pytest.raises(InputError, match=told):
        load_source("movielens-100k", tmp_path)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="grouplens"):
        load_source("movielens", tmp_path)
    write(tmp_path / "ml-1m" / "ratings.dat", "\t")
    with pytest.raises(InputError, match="4 numbers"):
        load_source("movielens", tmp_path)
    write(tmp_path / "ml-100k" / "u.data", "\t")
    with pytest.raises(InputError, match="at least 1 movie"):
        load_source("movielens-100k", tmp_path, history=0)


def write_many(folder: Path, people: int = 40, each: int = 12, movies: int = 60) -> None:
    draw = np.random.default_rng(0)
    lines = [
        (user, int(movie) + 1, time)
        for user in range(1, people + 1)
        for time, movie in enumerate(draw.permutation(movies)[:each], start=1)
    ]
    write(folder / "ml-100k" / "u.data", "\t", lines)
    write(folder / "ml-1m" / "ratings.dat", "::", lines)


@pytest.mark.parametrize("algorithm", ["parallel", "gradient_1way", "gradient_2way", "fedavg", "fedadam"])
def test_the_recipe_runs_with_every_method(algorithm: str, tmp_path: Path) -> None:
    write_many(tmp_path)
    settings = [f"data.folder={tmp_path}", f"algorithm={algorithm}", "rounds=2", "cohort=5", "evaluate.every=1"]
    recipe = resolve(override(load("movies-100k"), [*settings, "simulator.executor=vmap", "data.validation=0.1"]))
    experiment = build(recipe)
    assert bool(experiment.algorithm.rows) == (algorithm in ("parallel", "gradient_1way", "gradient_2way"))
    result = experiment.run()
    assert set(result.metrics) == {"loss", "recall@1", "recall@5", "recall@10"}
    per_client = result.ledger["bytes_down"] / 10
    whole = (1682 * 32 + 32 * 32 + 32) * 4
    assert per_client < whole / 5 if experiment.algorithm.rows else per_client == whole


@pytest.mark.parametrize("recipe", ["movies", "movies-100k"])
def test_the_scale_of_every_method_is_one_that_was_tried(recipe: str) -> None:
    table = load(recipe)
    for algorithm in ("fedavg", "parallel", "gradient_1way", "gradient_2way"):
        found = resolve(table | {"algorithm": algorithm})
        assert found.regulariser.scale in table["tune"][algorithm]["regulariser"]["scale"]
        assert found.published[algorithm] == {"recall@10": 0.1}


def test_the_centre_may_train_on_the_people_it_holds(tmp_path: Path) -> None:
    write_many(tmp_path)
    settings = [f"data.folder={tmp_path}", "rounds=1", "cohort=5", "data.validation=0.1", "central.batch_size=8"]
    for with_data, examples in (("false", 0), ("true", 8 * 10)):
        table = override(load("movies"), [*settings, f"regulariser.with_data={with_data}"])
        assert build(resolve(table)).run().ledger["server_examples"] == examples


@pytest.mark.parametrize("algorithm", ["center", "transfer", "fed_ft", "hfcl"])
def test_a_method_that_needs_the_centres_people_says_how(algorithm: str, tmp_path: Path) -> None:
    write_many(tmp_path)
    settings = [f"data.folder={tmp_path}", "rounds=2", "cohort=5", "data.validation=0.1", f"algorithm={algorithm}"]
    with pytest.raises(InputError, match=r"set regulariser\.with_data=true"):
        build(resolve(override(load("movies-100k"), settings)))
    experiment = build(resolve(override(load("movies-100k"), [*settings, "regulariser.with_data=true"])))
    assert experiment.run().ledger["server_examples"] > 10 * 10  # batches of more than one example


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("algorithm=fedavg", "those of fedavg do not: they need whole tables for the regulariser"),
        ("rows.exchange=false", "those of parallel do not: rows.exchange is false"),
    ],
)
def test_by_touch_is_refused_without_row_exchange(setting: str, told: str, tmp_path: Path) -> None:
    write_many(tmp_path)
    settings = [f"data.folder={tmp_path}", "data.validation=0.1", "rows.by_touch=true", "cohort=5"]
    build(resolve(override(load("movies-100k"), settings)))
    with pytest.raises(InputError, match=told):
        build(resolve(override(load("movies-100k"), [*settings, setting])))


def test_whole_people_are_held_out_and_at_the_centre(tmp_path: Path) -> None:
    write_many(tmp_path)
    scenario = build_scenario(
        resolve(override(load("movies"), [f"data.folder={tmp_path}", "data.validation=0.1", "data.held_out=0.1"]))
    )
    assert scenario.central is not None
    assert scenario.validation is not None
    assert len(scenario.test) == 4 * 11
    assert len(scenario.validation) == 4 * 11
    assert len(scenario.central) == 8 * 11
    assert len(scenario.clients) == 24


def test_spreadout_needs_a_table() -> None:
    with pytest.raises(InputError, match="no table of embeddings"):
        build(resolve(override(load("digits"), ["regulariser.name=spreadout"])))
