"""Data from files: .npz, Parquet, Hugging Face datasets on disk, and the partitioners of flwr-datasets.

Every reader takes ``fields``, which chooses columns by name (``["x", "y"]``) or renames them
(``{"x": "image", "y": "label"}``, ours first); without it all columns are taken but the clients' one.
The libraries behind Parquet, Hugging Face and Flower are extras, imported only when used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.data._files import load_npz, reading, require_fields
from mixfed.data.store import CentralData, FederatedData, Prepare
from mixfed.errors import InputError

Columns = dict[str, NDArray[Any]]
Choice = Mapping[str, str] | Sequence[str] | None
Read = Callable[[Sequence[str] | None], Columns]
Size = tuple[int, int] | None

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
    return _federated(partial(_parquet, file), client, fields, prepare)


def central_from_parquet(file: str | Path, fields: Choice = None, prepare: Prepare | None = None) -> CentralData:
    """Central data from a Parquet file, or a folder of them."""
    return _central(partial(_parquet, file), fields, prepare)


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
    return _federated(partial(_from_disk, folder, split, size), client, fields, prepare)


def central_from_huggingface(
    folder: str | Path,
    fields: Choice = None,
    prepare: Prepare | None = None,
    split: str | None = None,
    size: Size = None,
) -> CentralData:
    """Central data from a Hugging Face dataset written with ``save_to_disk``."""
    return _central(partial(_from_disk, folder, split, size), fields, prepare)


def from_partitioner(partitioner: Any, fields: Choice = None, prepare: Prepare | None = None) -> FederatedData:
    """Clients as a flwr-datasets partitioner makes them, one per partition, in its order."""
    kind = _extra("flwr_datasets.partitioner", "flower-datasets").Partitioner
    if not isinstance(partitioner, kind):
        raise InputError(f"a {type(partitioner).__name__} is no partitioner of flwr-datasets; give one of those")
    if not partitioner.is_dataset_assigned():
        raise InputError("the partitioner has no dataset; set partitioner.dataset first")
    parts = map(partitioner.load_partition, range(partitioner.num_partitions))
    read = partial(_huggingface, "the partition", None)
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
    extra = [] if client is None else [client]
    if fields is None:
        columns = read(None)
        require_fields("the data", extra, list(columns))
        return columns
    renamed = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
    if client in renamed:
        raise InputError(f"'{client}' is both a field and the clients' column; name the field otherwise")
    columns = read([*dict.fromkeys([*renamed.values(), *extra])])
    return {**{name: columns[column] for name, column in renamed.items()}, **{name: columns[name] for name in extra}}


def _extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise InputError(f"this needs the package '{package}'; pip install \"mixfed[{extra}]\"") from error


def _parquet(file: str | Path, names: Sequence[str] | None) -> Columns:
    parquet = _extra("pyarrow.parquet", "parquet")
    with reading(file):
        require_fields(file, names or (), parquet.ParquetDataset(file).schema.names)
        table = parquet.read_table(file, columns=names)
        return {name: _dense(table[name].combine_chunks(), name) for name in table.column_names}


def _from_disk(folder: str | Path, split: str | None, size: Size, names: Sequence[str] | None) -> Columns:
    datasets = _extra("datasets", "huggingface")
    with reading(folder):
        dataset = datasets.load_from_disk(str(folder))
        if isinstance(dataset, datasets.DatasetDict):
            if split not in dataset:
                raise InputError(f"'{folder}' has the splits {', '.join(dataset)}; choose one with split=")
            dataset = dataset[split]
        elif split is not None:
            raise InputError(f"'{folder}' has no splits; leave split out")
        return _huggingface(folder, size, dataset, names)


def _huggingface(place: str | Path, size: Size, dataset: Any, names: Sequence[str] | None) -> Columns:
    """Columns of a Hugging Face dataset: images through their decoder, the rest straight from Arrow."""
    image = _extra("datasets", "huggingface").Image
    require_fields(place, names or (), dataset.column_names)
    chosen = dataset.select_columns(list(names or dataset.column_names))
    pictures = [name for name, feature in chosen.features.items() if isinstance(feature, image)]
    table = chosen.remove_columns(pictures).with_format("arrow")[:]
    columns = {name: _dense(table[name].combine_chunks(), name) for name in table.column_names}
    return columns | {name: _pictures(chosen.select_columns(name), name, size) for name in pictures}


def _pictures(dataset: Any, name: str, size: Size) -> NDArray[np.uint8]:
    """Decoded images as one array (examples, channels, height, width)."""
    decoded = (example[name] for example in dataset.with_format(None))
    if size is not None:
        decoded = (image.resize(size[::-1], _extra("PIL.Image", "huggingface").Resampling.BOX) for image in decoded)
    images = [np.asarray(image) for image in decoded]
    if len({image.shape for image in images}) != 1:
        raise InputError(f"the images in '{name}' differ in size or channels; make them equal first")
    stacked = np.stack(images)
    return stacked[:, None] if stacked.ndim == 3 else np.ascontiguousarray(np.moveaxis(stacked, -1, 1))


def _dense(column: Any, name: str) -> NDArray[Any]:
    """An Arrow column as an array; lists become a further dimension, and gaps are refused."""
    arrow = _extra("pyarrow", "parquet")
    if isinstance(column, arrow.ChunkedArray):
        column = arrow.concat_arrays(column.chunks) if column.num_chunks else arrow.array([], column.type)
    if isinstance(column, arrow.ExtensionArray):
        column = column.storage
    if isinstance(column, arrow.DictionaryArray):
        column = column.dictionary_decode()
    if column.null_count:
        raise InputError(f"column '{name}' has {column.null_count} missing values; fill or drop them first")
    kind = column.type
    if not (arrow.types.is_list(kind) or arrow.types.is_large_list(kind) or arrow.types.is_fixed_size_list(kind)):
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values
    lengths = _extra("pyarrow.compute", "parquet").list_value_length(column).unique()
    if len(lengths) > 1:
        raise InputError(f"the lists in column '{name}' differ in length; pad them first")
    inner = _dense(column.flatten(), name)
    return inner.reshape(len(column), lengths[0].as_py() if len(lengths) else 0, *inner.shape[1:])
