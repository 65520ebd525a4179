"""Label names and their numbers: the same map at training, at evaluation and in the saved configuration.

- `canonical_label()` gives one spelling to each label, whatever the file format did to it: 1, 1.0, "1", "1.0" are "1".
- `LabelMap` numbers the names; it is built from training data (`build_label_map()`) or from a model (`from_config()`).
- `read_labels()` takes a column out of a data set as names; `ClassLabel` numbers become their names.
"""

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Integral, Real

from datasets import ClassLabel, Dataset

from .normalization import normalize_text

logger = logging.getLogger(__name__)

SEPARATOR = ";"
_WHOLE_NUMBER = re.compile(r"([+-]?)0*(\d+)\.0*")
_MAX_LISTED = 20  # names shown in an error


def canonical_label(value: object) -> str | None:
    """Spell a label as text, or give None where there is none (empty cell, NaN, null).

    Spreadsheets and pandas turn the class 1 into 1.0, so whole numbers lose their decimals.
    """
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return str(int(value)) if float(value).is_integer() else repr(float(value))
    if not isinstance(value, str):
        raise TypeError(
            f"label {value!r} is a {type(value).__name__}, but one text has one label: a text or a number. "
            "Cells with several labels need the task multi_label"
        )
    text = normalize_text(value)
    number = _WHOLE_NUMBER.fullmatch(text)
    if number:
        sign, digits = number.groups()
        text = ("-" if sign == "-" and digits != "0" else "") + digits
    return text or None


def split_labels(value: object, separator: str = SEPARATOR) -> list[str]:
    """Take the labels out of one multi-label cell: a list, or a text such as 快递;质量. An empty cell has none."""
    if value is None:
        return []
    if isinstance(value, str):
        # NFKC makes the full-width ；the plain one, so that both separate.
        value = normalize_text(value).split(normalize_text(separator))
    elif not isinstance(value, (list, tuple)):
        value = [value]
    elif len(value) > 1 and set(value) <= {0, 1} and len(value) != len(set(value)):
        raise ValueError(
            f"label cell {list(value)!r} looks like a row of 0-1 flags, but multi_label takes the labels themselves: "
            "write the names that apply, as a list or separated by " + repr(separator)
        )
    names = [canonical_label(part) for part in value]
    return list(dict.fromkeys(name for name in names if name is not None))


def _order(name: str) -> tuple:
    """Numbers by value, then names by code point: no hash and no locale takes part."""
    try:
        return (0, float(name), name)
    except ValueError:
        return (1, 0.0, name)


def _tag_order(name: str) -> tuple:
    """Order IOB2 tags as O, B-LOC, I-LOC, B-PER, ..."""
    prefix, _, entity = name.partition("-")
    return (name != "O", entity, prefix)


@dataclass(frozen=True)
class LabelMap:
    """The classes of a task: `names[i]` is the label with number i."""

    names: tuple[str, ...]
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        numbers: dict[str, int] = {}
        for number, name in enumerate(self.names):
            key = canonical_label(name)
            if key is None or key in numbers:
                raise ValueError(
                    f"label names {self.names!r}: {name!r} is empty or means the same as another; rename it"
                )
            numbers[key] = number
        if all(name == f"LABEL_{number}" for number, name in enumerate(self.names)):
            # The names transformers makes up for a model that was given none: the numbers are the labels.
            numbers |= {str(number): number for number in range(len(self.names))}
        object.__setattr__(self, "_numbers", numbers)

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def from_config(cls, config) -> "LabelMap":
        """Rebuild the map that a model was trained with from its `config.id2label`."""
        id2label = {int(number): name for number, name in config.id2label.items()}
        if sorted(id2label) != list(range(len(id2label))):
            raise ValueError(
                f"config.id2label has the numbers {sorted(id2label)}, but labels are counted 0, 1, 2, ... without gaps"
                "; repair config.json"
            )
        return cls(tuple(str(id2label[number]) for number in range(len(id2label))))

    @property
    def id2label(self) -> dict[int, str]:
        """The map as `config.id2label` keeps it."""
        return dict(enumerate(self.names))

    @property
    def label2id(self) -> dict[str, int]:
        """The map as `config.label2id` keeps it."""
        return {name: number for number, name in enumerate(self.names)}

    def encode(self, labels: Iterable[object], where: str = "data") -> list[int]:
        """Number one label for each row.

        Args:
            where: what the rows are, for the message ("test", a file name).
        """
        return [self._number(label, row, where) for row, label in enumerate(labels)]

    def encode_rows(self, rows: Iterable[Iterable[object]], where: str = "data") -> list[list[int]]:
        """Number several labels for each row: the tags of its words, or all the labels that apply."""
        return [[self._number(label, row, where) for label in labels] for row, labels in enumerate(rows)]

    def _number(self, label: object, row: int, where: str) -> int:
        name = canonical_label(label)
        if name is None:
            raise ValueError(f"row {row} of {where} has no label ({label!r}); fill it in or take the row out")
        if name not in self._numbers:
            near = get_close_matches(name, self._numbers, n=1)
            raise ValueError(
                f"label {name!r} in row {row} of {where} is not one of the {len(self)} known labels: "
                f"{_listed(self.names)}. "
                + (f"Did you mean {near[0]!r}? " if near else "")
                + "Correct the row, or train with this label"
            )
        return self._numbers[name]


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names) - _MAX_LISTED} more)" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def build_label_map(labels: Iterable[object], *, names: Sequence[str] | None = None, where: str = "train") -> LabelMap:
    """Number the classes of a training set: whole numbers by value, names by code point.

    Args:
        labels: one label for each row.
        names: the order to number them in, where it is known (all of them are kept, seen in `labels` or not).
        where: what the rows are, for the messages.
    """
    seen = {}
    for row, label in enumerate(labels):
        name = canonical_label(label)
        if name is None:
            raise ValueError(f"row {row} of {where} has no label ({label!r}); fill it in or take the row out")
        seen[name] = True
    if len(seen) < 2:
        raise ValueError(
            f"{where} has {len(seen)} class{'' if len(seen) == 1 else 'es'} ({_listed(list(seen))}), but telling "
            "texts apart takes at least 2. Check label_column, or choose the task regression if the label is a score"
        )
    label_map = LabelMap(tuple(names) if names else tuple(sorted(seen, key=_order)))
    label_map.encode(seen, where)  # names that are given must cover the data
    if any(SEPARATOR in name for name in seen):
        logger.warning(
            "labels of %s hold %r and are taken as they stand (%s): choose the task multi_label to split them",
            where, SEPARATOR, _listed([name for name in seen if SEPARATOR in name]),
        )  # fmt: skip
    return label_map


def build_multi_label_map(
    rows: Iterable[Iterable[str]], *, names: Sequence[str] | None = None, where: str = "train"
) -> LabelMap:
    """Number the labels of a multi-label training set, whose rows have any number of them."""
    rows = list(rows)
    seen = dict.fromkeys(name for row in rows for name in row)
    if not seen:
        raise ValueError(f"no row of {where} has a label; check label_column")
    label_map = LabelMap(tuple(names) if names else tuple(sorted(seen, key=_order)))
    label_map.encode_rows(rows, where)
    return label_map


def build_tag_map(
    rows: Iterable[Iterable[object]], *, names: Sequence[str] | None = None, where: str = "train"
) -> LabelMap:
    """Number the tags of a token-classification set, O first; B-X and I-X come together even if one is not seen."""
    seen = dict.fromkeys(name for row in rows for tag in row if (name := canonical_label(tag)) is not None)
    if len(seen) < 2:
        raise ValueError(
            f"{where} has {len(seen)} kind of tag ({_listed(list(seen))}), but at least 2 are needed; check it"
        )
    if names:
        return LabelMap(tuple(names))
    if "O" in seen and all(name == "O" or name[:2] in ("B-", "I-") for name in seen):
        kinds = dict.fromkeys(name[2:] for name in seen if name != "O")
        seen = dict.fromkeys(["O"] + [prefix + kind for kind in kinds for prefix in ("B-", "I-")])
    return LabelMap(tuple(sorted(seen, key=_tag_order)))


def class_names(dataset: Dataset, column: str) -> list[str] | None:
    """Names of a column that `datasets` knows as `ClassLabel` (or lists of it), in their order; None for others."""
    feature = dataset.features[column]
    feature = getattr(feature, "feature", feature)
    return list(feature.names) if isinstance(feature, ClassLabel) else None


def read_labels(dataset: Dataset, column: str) -> list:
    """Take a label column out of a data set, with the numbers of a `ClassLabel` turned into their names."""
    values = dataset[column][:]
    names = class_names(dataset, column)
    if names is None:
        return values
    # -1 is how `datasets` marks a row whose label is not published.
    decode = lambda number: None if number is None or number < 0 else names[number]  # noqa: E731
    return [[decode(n) for n in value] if isinstance(value, list) else decode(value) for value in values]
