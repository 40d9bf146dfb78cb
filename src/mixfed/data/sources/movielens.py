"""MovieLens: which movie does a person rate next? 1M (6,040 people, 3,952 movies) and 100k (943 and 1,682).

The files may be used for research and not be passed on (see their README), so they stay in a folder of yours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays
from mixfed.data._files import content, load_npz, reading, require_fields
from mixfed.data.sources.base import Source, find
from mixfed.errors import InputError

DESCRIPTION = "MovieLens 1M, the next movie of 6,040 people out of 3,952, from the ones before (research use only)"
DESCRIPTION_100K = "MovieLens 100k, the next movie of 943 people out of 1,682, from the ones before (research use only)"
OBTAIN = "grouplens.org/datasets/movielens"
LICENCE = "research use; may not be redistributed, nor used commercially without permission"
SHORTEST = 3
"""People with fewer ratings are left out, as in Ning et al. (2021)."""

Ints = NDArray[np.int64]


def load(folder: Path | None = None, history: int = 10) -> Source:
    """1M, from ``movielens/ml-1m_ratings.npz``, ``ml-1m/ratings.dat`` or ``movielens/ratings.dat``, plain or gzipped.

    An example is a movie and the up to ``history`` movies that the same person rated before it, the nearest last, with
    −1 for none. A person's ratings are in the order of their times where these are known (a time of 0 is unknown); the
    npz may have ``last_movie_id``, what person u = 1, 2, … rated last, in place u − 1.
    """
    file = find(folder, OBTAIN, "movielens/ml-1m_ratings.npz", "ml-1m/ratings.dat", "movielens/ratings.dat")
    return _source(_read(file, "::"), 3952, history, DESCRIPTION)


def load_100k(folder: Path | None = None, history: int = 10) -> Source:
    """100k, from ``movielens/ml-100k_u.data``, ``ml-100k/u.data`` or ``movielens/u.data``, plain or gzipped; see 1M."""
    file = find(folder, OBTAIN, "movielens/ml-100k_u.data", "ml-100k/u.data", "movielens/u.data")
    return _source(_read(file, "\t"), 1682, history, DESCRIPTION_100K)


def _read(file: Path, between: str) -> dict[str, Ints]:
    """Users, movies and times of the ratings, in the order of the file."""
    if file.suffix == ".npz":
        return _from_npz(file)
    with reading(file):
        found = content(file)
        lines = [line.split(between) for line in found.decode("latin-1").splitlines() if line]
        if not lines or any(len(line) != 4 for line in lines):
            raise ValueError(f"every line must have 4 numbers with '{between}' between them")
        table = np.array(lines).astype(np.int64)
        return {"user_id": table[:, 0], "movie_id": table[:, 1], "timestamp": table[:, 3]}


def _from_npz(file: Path) -> dict[str, Ints]:
    arrays = load_npz(file)
    wanted = ["user_id", "movie_id", "timestamp"]
    require_fields(file, wanted, list(arrays))
    found = {n: _whole_numbers(file, n, arrays[n]) for n in [*wanted, "last_movie_id"] if n in arrays}
    if len({len(found[n]) for n in wanted}) > 1:
        told = ", ".join(f"{len(found[n]):,} of {n}" for n in wanted)
        raise InputError(f"The ratings in '{file}' need as many users as movies and times, and it has {told}.")
    people = int(found["user_id"].max())
    if "last_movie_id" in found and len(found["last_movie_id"]) < people:
        raise InputError(
            f"'{file}' has users up to {people}, and last_movie_id has {len(found['last_movie_id'])} entries; it needs"
            " one for each user, in the order of their numbers."
        )
    return found


def _whole_numbers(file: Path, name: str, array: NDArray[Any]) -> Ints:
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iuf":
        told = f"{list(array.shape)} of {array.dtype}"
        raise InputError(f"'{name}' in '{file}' must be a list of numbers, and it is {told}.")
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.rint(array)).all()):
        raise InputError(f"'{name}' in '{file}' must hold whole numbers (a time that is unknown is 0).")
    return array.astype(np.int64)


def _source(ratings: dict[str, Ints], movies: int, history: int, description: str) -> Source:
    if history < 1:
        raise InputError(f"An example needs a history of at least 1 movie, not {history}.")
    low, high = int(ratings["movie_id"].min()), int(ratings["movie_id"].max())
    if low < 1 or high > movies:
        raise InputError(f"The movies of this dataset are numbered 1 to {movies}, and the file has {low} to {high}.")
    if int(ratings["user_id"].min()) < 1:
        raise InputError(
            f"The people of this dataset are numbered from 1, and the file has {ratings['user_id'].min()}."
        )
    order = in_time(ratings["user_id"], ratings["movie_id"], ratings["timestamp"], ratings.get("last_movie_id"))
    train, people = windows(ratings["user_id"][order], ratings["movie_id"][order] - 1, history)
    return Source(
        train=train,
        test={n: x[:0] for n, x in train.items()},
        prepare=None,
        classes=movies,
        natural_clients={"train": people, "test": people[:0]},
        description=description,
        licence=LICENCE,
    )


def in_time(users: Ints, movies: Ints, times: Ints, last: Ints | None = None) -> Ints:
    """Row numbers that put each person's ratings together and in order.

    Ratings of known time stand in the order of their times in the places that they have in the file, so those of
    unknown time keep their places between them; ``last[u − 1]``, where given, is what person u rated last.
    """
    at_end = np.zeros(len(users), np.bool_) if last is None else movies == last[users - 1]
    order = np.lexsort((np.arange(len(users)), at_end, users))
    known = np.flatnonzero(times[order] > 0)
    free = known[~at_end[order][known]]
    chosen = order[free]
    order[free] = chosen[np.lexsort((chosen, times[chosen], users[chosen]))]
    return order


def windows(users: Ints, movies: Ints, history: int) -> tuple[Arrays, Ints]:
    """Every movie but a person's first, with those before it; and the person. Ratings of a person stand together."""
    start = np.flatnonzero(np.diff(users, prepend=users[0] - 1))
    sizes = np.diff(np.append(start, len(users)))
    place = np.arange(len(users)) - np.repeat(start, sizes)
    label = np.flatnonzero((place > 0) & (np.repeat(sizes, sizes) >= SHORTEST))
    back = np.arange(-history, 0)
    seen = np.where(place[label, None] + back >= 0, movies[np.maximum(label[:, None] + back, 0)], -1)
    return {"x": seen.astype(np.int32), "y": movies[label].astype(np.int64)}, users[label]
