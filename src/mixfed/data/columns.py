"""Columns of a file as arrays: .npz, CSV, Parquet, Arrow, and Hugging Face datasets on disk.

The libraries behind all but .npz are extras, imported only when used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from mixfed.data._files import load_npz, reading, require_fields, require_room
from mixfed.errors import InputError, from_extra

Columns = dict[str, NDArray[Any]]
Size = tuple[int, int] | None
GAPS = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"]
"""What stands for a missing value in a CSV file."""


def extra(module: str, extra: str) -> Any:
    """A module of a package that is an extra, or a sentence that says which."""
    return from_extra(module, extra, f"What is read by the package '{module.partition('.')[0]}'")


def parquet(file: str | Path, names: Sequence[str] | None) -> Columns:
    """Columns of a Parquet file, or of a folder of them; lists of equal length become a dimension."""
    extra("pyarrow.parquet", "parquet")
    with reading(file):
        return _of_table(_parquet(Path(file), names), drop_gaps=False)


def _parquet(file: Path, names: Sequence[str] | None) -> Any:
    package = extra("pyarrow.parquet", "parquet")
    require_fields(file, names or (), package.ParquetDataset(file).schema.names)
    return package.read_table(file, columns=names)


def _csv(file: Path, names: Sequence[str] | None) -> Any:
    """A file with a header, plain or gzipped; the types are found out from the values."""
    package = extra("pyarrow.csv", "files")
    require_room(file, file.stat().st_size)
    require_fields(file, names or (), column_names(file))
    options = package.ConvertOptions(strings_can_be_null=True, null_values=GAPS, include_columns=names)
    return package.read_csv(str(file), convert_options=options, parse_options=_parsing(file))


def _arrow(file: Path, names: Sequence[str] | None) -> Any:
    """A file of the kind with an index (Feather), or a stream."""
    with extra("pyarrow", "files").memory_map(str(file)) as source:
        table = _opened(source).read_all()
    require_fields(file, names or (), table.column_names)
    return table.select(names) if names else table


TABLES = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".arrow": _arrow, ".feather": _arrow}
KINDS = (".npz", *TABLES)
"""The ends of names of files that can be read (.csv.gz is CSV)."""


def kind_of(file: Path) -> str:
    """The end of a file's name that says how to read it; "" for a folder of a Hugging Face dataset, or unknown ones."""
    return next((suffix for suffix in reversed(file.suffixes) if suffix in KINDS), "")


def read_columns(file: Path, names: Sequence[str] | None = None, drop_gaps: bool = False) -> Columns:
    """The given (or all) columns of a file, by the end of its name, or of a Hugging Face dataset in a folder.

    A column with missing values is refused, unless rows that have some are dropped.
    """
    if is_dataset(file):
        return from_disk(file, None, None, names, drop_gaps)
    column_names(file)  # which refuses a file that is not there, or of no known kind
    if kind_of(file) == ".npz":
        return _without_gaps(load_npz(file, names)) if drop_gaps else load_npz(file, names)
    with reading(file):
        table = TABLES[kind_of(file)](file, names)
        gaps = {name: table[name].null_count for name in table.column_names if table[name].null_count}
        if gaps and not drop_gaps:
            name, count = next(iter(gaps.items()))
            told = f"The column '{name}' of '{file}' has {count:,} missing values"
            raise InputError(f"{told}; fill them, or leave these examples out with missing = 'drop'")
        return _of_table(table, drop_gaps)


def whole_columns(file: Path) -> dict[str, tuple[NDArray[Any], int]]:
    """Every column without its missing values, and how many these are; what is no array of one shape is left out."""
    column_names(file)
    with reading(file):
        if kind_of(file) == ".npz":
            return {name: _known(array) for name, array in load_npz(file).items() if array.ndim}
        if not is_dataset(file):
            return _known_of_table(TABLES[kind_of(file)](file, None))
        dataset = _dataset(file, None)
        pictures = _picture_columns(dataset)
        decoded = {name: (_pictures(dataset.select_columns(name), name, None), 0) for name in pictures}
        return _known_of_table(dataset.remove_columns(pictures).with_format("arrow")[:]) | decoded


def _known_of_table(table: Any) -> dict[str, tuple[NDArray[Any], int]]:
    found = {}
    for name in table.column_names:
        with suppress(InputError):  # lists of different lengths, say: nothing that can be learnt from
            values, gaps = _known(_dense(table[name].drop_null().combine_chunks(), name))
            found[name] = values, gaps + table[name].null_count
    return found


def _known(array: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """The rows without NaN, and how many have some."""
    whole = _is_whole(array)
    return array[whole], int((~whole).sum())


def _is_whole(array: NDArray[Any]) -> NDArray[np.bool_]:
    whole = np.ones(len(array), np.bool_)
    if array.dtype.kind == "f":
        whole &= ~np.isnan(array).any(axis=tuple(range(1, array.ndim)))
    return whole


def _without_gaps(arrays: Columns) -> Columns:
    whole = np.logical_and.reduce([_is_whole(array) for array in arrays.values()])
    return {name: array[whole] for name, array in arrays.items()}


def column_names(file: Path) -> list[str]:
    """The names of a file's columns, of which no more than that is read."""
    if file.is_file() and not file.stat().st_size:
        raise InputError(f"'{file}' is empty; look how it was written")
    found = _column_names(file)
    twice = [name for name in found if found.count(name) > 1]
    if twice:
        raise InputError(f"'{file}' has two columns '{twice[0]}'; give each a name of its own")
    return found


def _column_names(file: Path) -> list[str]:
    with reading(file):
        if is_dataset(file):
            dataset = extra("datasets", "huggingface").load_from_disk(str(file))
            return list(getattr(dataset, "column_names", []))
        match kind_of(file):
            case ".npz":
                with ZipFile(file) as archive:
                    return [name.removesuffix(".npy") for name in archive.namelist()]
            case ".csv" | ".tsv":
                package = extra("pyarrow.csv", "files")
                return _separated(file, package.open_csv(str(file), parse_options=_parsing(file)).schema.names)
            case ".parquet":
                return list(extra("pyarrow.parquet", "parquet").read_schema(file).names)
            case ".arrow" | ".feather":
                with extra("pyarrow", "files").memory_map(str(file)) as source:
                    return list(_opened(source).schema.names)
    if file.suffix == ".npy":
        raise InputError(f"'{file}' holds a single array; save named arrays with numpy.savez")
    raise InputError(f"'{file}' is of no known kind; there are {', '.join(KINDS)} and Hugging Face folders")


def _separated(file: Path, names: Sequence[str]) -> list[str]:
    """The names of a CSV file's columns, unless something else than commas (in .tsv: tabs) is between them."""
    if len(names) == 1:
        other = next((mark for mark in (";", "\t", "|", ",") if mark in names[0]), None)
        if other:
            comma = "tabs" if kind_of(file) == ".tsv" else "commas"
            told = f"'{file}' has {'a tab' if other == chr(9) else repr(other)} between its columns"
            raise InputError(f"{told}, where {comma} are expected; save it with {comma}")
    return list(names)


def _parsing(file: Path) -> Any:
    return extra("pyarrow.csv", "files").ParseOptions(delimiter="\t" if kind_of(file) == ".tsv" else ",")


def _opened(source: Any) -> Any:
    package = extra("pyarrow", "files")
    try:
        return package.ipc.open_file(source)
    except package.ArrowInvalid:
        source.seek(0)
        return package.ipc.open_stream(source)


def is_dataset(folder: Path) -> bool:
    """Whether a folder is a dataset as Hugging Face's ``save_to_disk`` writes it."""
    return any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def _of_table(table: Any, drop_gaps: bool) -> Columns:
    table = table.drop_null() if drop_gaps else table
    return {name: _dense(table[name].combine_chunks(), name) for name in table.column_names}


def from_disk(
    folder: str | Path, split: str | None, size: Size, names: Sequence[str] | None, drop_gaps: bool = False
) -> Columns:
    """Columns of a Hugging Face dataset that ``save_to_disk`` wrote."""
    extra("datasets", "huggingface")
    with reading(folder):
        return huggingface(folder, size, _dataset(folder, split), names, drop_gaps)


def _dataset(folder: str | Path, split: str | None) -> Any:
    datasets = extra("datasets", "huggingface")
    dataset = datasets.load_from_disk(str(folder))
    if not isinstance(dataset, datasets.DatasetDict):
        if split is not None:
            raise InputError(f"'{folder}' has no splits; leave split out")
        return dataset
    if split not in dataset:
        told = f"'{folder}' has the splits {', '.join(dataset)}; choose one with split="
        raise InputError(f"{told}, or name its folder, such as '{Path(folder) / next(iter(dataset))}'")
    return dataset[split]


def huggingface(
    place: str | Path, size: Size, dataset: Any, names: Sequence[str] | None, drop_gaps: bool = False
) -> Columns:
    """Columns of a Hugging Face dataset: images through their decoder, the rest straight from Arrow."""
    require_fields(place, names or (), dataset.column_names)
    chosen = dataset.select_columns(list(names or dataset.column_names))
    pictures = _picture_columns(chosen)
    columns = _of_table(chosen.remove_columns(pictures).with_format("arrow")[:], drop_gaps and not pictures)
    return columns | {name: _pictures(chosen.select_columns(name), name, size) for name in pictures}


def _picture_columns(dataset: Any) -> list[str]:
    image = extra("datasets", "huggingface").Image
    return [name for name, feature in dataset.features.items() if isinstance(feature, image)]


def _pictures(dataset: Any, name: str, size: Size) -> NDArray[np.uint8]:
    """Decoded images as one array (examples, channels, height, width)."""
    decoded = (example[name] for example in dataset.with_format(None))
    if size is not None:
        decoded = (image.resize(size[::-1], extra("PIL.Image", "huggingface").Resampling.BOX) for image in decoded)
    images = [np.asarray(image) for image in decoded]
    if len({image.shape for image in images}) != 1:
        raise InputError(f"the images in '{name}' differ in size or channels; make them equal first")
    stacked = np.stack(images)
    return stacked[:, None] if stacked.ndim == 3 else np.ascontiguousarray(np.moveaxis(stacked, -1, 1))


def _dense(column: Any, name: str) -> NDArray[Any]:
    """An Arrow column as an array; lists become a further dimension, and gaps are refused."""
    arrow = extra("pyarrow", "parquet")
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
    lengths = extra("pyarrow.compute", "parquet").list_value_length(column).unique()
    if len(lengths) > 1:
        raise InputError(f"the lists in column '{name}' differ in length; pad them first")
    inner = _dense(column.flatten(), name)
    return inner.reshape(len(column), lengths[0].as_py() if len(lengths) else 0, *inner.shape[1:])
