"""Data from files: .npz, Parquet, Hugging Face datasets on disk, and the partitioners of flwr-datasets.

Every reader takes ``fields``, which chooses columns by name (``["x", "y"]``) or renames them
(``{"x": "image", "y": "label"}``, ours first); without it all columns are taken but the clients' one.
The libraries behind Parquet, Hugging Face and Flower are extras, imported only when used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mixfed.data._files import load_npz, require_fields
from mixfed.data.columns import Columns, Size, extra, from_disk, huggingface, parquet
from mixfed.data.store import CentralData, FederatedData, Prepare
from mixfed.errors import InputError

Choice = Mapping[str, str] | Sequence[str] | None
Read = Callable[[Sequence[str] | None], Columns]

__all__ = [
    "central_from_huggingface",
    "central_from_npz",
    "central_from_parquet",
    "federated_from_huggingface",
    "federated_from_npz",
    "federated_from_parquet",
    "from_partitioner",
]


def federated_from_npz(
    file: str | Path, client: str, fields: Choice = None, prepare: Prepare | None = None
) -> FederatedData:
    """Clients from a .npz file whose array ``client`` has one key per example."""
    return _federated(partial(load_npz, file), client, fields, prepare)


def central_from_npz(file: str | Path, fields: Choice = None, prepare: Prepare | None = None) -> CentralData:
    """Central data from a .npz file."""
    return _central(partial(load_npz, file), fields, prepare)


def federated_from_parquet(
    file: str | Path, client: str, fields: Choice = None, prepare: Prepare | None = None
) -> FederatedData:
    """Clients from a Parquet file, or a folder of them, whose column ``client`` has one key per example.

    Lists of equal length become a dimension.
    """
    return _federated(partial(parquet, file), client, fields, prepare)


def central_from_parquet(file: str | Path, fields: Choice = None, prepare: Prepare | None = None) -> CentralData:
    """Central data from a Parquet file, or a folder of them."""
    return _central(partial(parquet, file), fields, prepare)


def federated_from_huggingface(
    folder: str | Path,
    client: str,
    fields: Choice = None,
    prepare: Prepare | None = None,
    split: str | None = None,
    size: Size = None,
) -> FederatedData:
    """Clients from a Hugging Face dataset written with ``save_to_disk``, by its column ``client``.

    Images are decoded to bytes with channels first, and averaged to ``size`` (height, width) if it is given, one by
    one, so that large ones need little memory. ``split`` names the part of a dataset that has several.
    """
    return _federated(partial(from_disk, folder, split, size), client, fields, prepare)


def central_from_huggingface(
    folder: str | Path,
    fields: Choice = None,
    prepare: Prepare | None = None,
    split: str | None = None,
    size: Size = None,
) -> CentralData:
    """Central data from a Hugging Face dataset written with ``save_to_disk``."""
    return _central(partial(from_disk, folder, split, size), fields, prepare)


def from_partitioner(partitioner: Any, fields: Choice = None, prepare: Prepare | None = None) -> FederatedData:
    """Clients as a flwr-datasets partitioner makes them, one per partition, in its order."""
    kind = extra("flwr_datasets.partitioner", "flower-datasets").Partitioner
    if not isinstance(partitioner, kind):
        raise InputError(f"a {type(partitioner).__name__} is no partitioner of flwr-datasets; give one of those")
    if not partitioner.is_dataset_assigned():
        raise InputError("the partitioner has no dataset; set partitioner.dataset first")
    parts = map(partitioner.load_partition, range(partitioner.num_partitions))
    read = partial(huggingface, "the partition", None)
    return FederatedData.from_datasets(
        [_choose(partial(read, part), fields) if len(part) else [] for part in parts], prepare
    )


def _federated(read: Read, client: str, fields: Choice, prepare: Prepare | None) -> FederatedData:
    columns = _choose(read, fields, client)
    keys = columns.pop(client)
    return FederatedData.from_arrays(columns, keys, prepare)


def _central(read: Read, fields: Choice, prepare: Prepare | None) -> CentralData:
    return CentralData.from_arrays(_choose(read, fields), prepare)


def _choose(read: Read, fields: Choice, client: str | None = None) -> Columns:
    """Read the chosen columns under our names, and the clients' column under its own."""
    keys = [] if client is None else [client]
    if fields is None:
        columns = read(None)
        require_fields("the data", keys, list(columns))
        return columns
    renamed = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
    if client in renamed:
        raise InputError(f"'{client}' is both a field and the clients' column; name the field otherwise")
    columns = read([*dict.fromkeys([*renamed.values(), *keys])])
    return {**{name: columns[column] for name, column in renamed.items()}, **{name: columns[name] for name in keys}}
