"""From texts to tokens: rows a model takes, and a report of what did not fit.

- `tokenize_splits()`: rows of a fine-tuning task with their `labels`, all checked before the first text is tokenised.
- `tokenize_texts()`: rows for masked language modelling; a long text becomes several rows, nothing is cut off.
"""

from dataclasses import dataclass
from uuid import uuid4

from datasets import Dataset, DatasetDict
from transformers import BatchEncoding, PreTrainedTokenizerBase

from .labels import LabelMap

IGNORED = -100  # label of a token that has no part in the loss
_UNLIMITED = 10**9  # transformers writes 1e30 into tokenizers that know no maximum


@dataclass
class Tally:
    """What became of the texts of one split."""

    num_texts: int
    num_truncated: int = 0
    longest: int = 0  # tokens, after cutting
    # Words of token classification that got no label: cut off, or of no piece (a zero-width character).
    num_words_lost: int = 0

    def count(self, encoded: BatchEncoding) -> None:
        """Add a batch that was encoded with truncation."""
        self.num_truncated += sum(bool(row.overflowing) for row in encoded.encodings)
        self.longest = max(self.longest, *(len(row) for row in encoded["input_ids"]), 0)


@dataclass(frozen=True)
class TokenizeReport:
    """What did not fit, split by split; prints as a line for each."""

    max_length: int
    splits: dict[str, Tally]

    @property
    def num_truncated(self) -> int:
        """Texts that were cut, over all splits."""
        return sum(tally.num_truncated for tally in self.splits.values())

    def __str__(self) -> str:
        lines = []
        for name, tally in self.splits.items():
            share = tally.num_truncated / max(tally.num_texts, 1)
            lines.append(
                f"{name}: {tally.num_texts} texts, {tally.num_truncated} ({share:.1%}) cut at {self.max_length} tokens"
                f", longest row {tally.longest}"
                + (f", {tally.num_words_lost} words without a label" if tally.num_words_lost else "")
            )
        return "\n".join(lines)


def usable_length(tokenizer: PreTrainedTokenizerBase, max_length: int | None = None) -> int:
    """Settle the number of tokens a row may have: `max_length`, or else the tokenizer's own maximum."""
    limit = tokenizer.model_max_length
    if max_length is None:
        if limit > _UNLIMITED:
            raise ValueError("max_length is not given and the tokenizer has no model_max_length; give one of them")
        return int(limit)
    if max_length > limit:
        raise ValueError(
            f"max_length {max_length} is more than the tokenizer's model_max_length {limit}; give {limit} or less, or "
            "set tokenizer.model_max_length if the model can read more"
        )
    least = tokenizer.num_special_tokens_to_add() + 1
    if max_length < least:
        raise ValueError(
            f"max_length {max_length} leaves no room for text beside the special tokens; give at least {least}"
        )
    return max_length


def tokenize_splits(
    splits: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    task,
    *,
    max_length: int | None = None,
    label_map: LabelMap | None = None,
) -> tuple[DatasetDict, TokenizeReport]:
    """Turn rows of a task into `input_ids`, `attention_mask`, ... and `labels`.

    Args:
        splits: rows as `load_splits` makes them.
        task: one of `tasks.TASKS`.
        max_length: tokens a row may have; by default what the tokenizer says.
        label_map: as the model was trained with; by default built from train.
    """
    limit = usable_length(tokenizer, max_length)
    _require_fast(tokenizer)
    if label_map is None:
        label_map = task.label_map(splits["train"])
    labels = {name: task.encode(rows, label_map, where=name) for name, rows in splits.items()}
    tokenized, tallies = DatasetDict(), {}
    for name, rows in splits.items():
        tallies[name] = Tally(len(rows))
        tokenized[name] = rows.map(
            _RowEncoder(tokenizer, limit, labels[name], tallies[name]),
            batched=True,
            with_indices=True,
            remove_columns=rows.column_names,
            keep_in_memory=True,  # a cached result would leave the tally empty
            new_fingerprint=uuid4().hex,
            desc=f"Tokenizing {name}",
        )
    return tokenized, TokenizeReport(limit, tallies)


class _RowEncoder:
    """Encode batches of rows with labels that are numbers already, and keep the tally."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, labels: list, tally: Tally):
        self.tokenizer, self.max_length, self.labels, self.tally = tokenizer, max_length, labels, tally

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        has_words = "tokens" in batch
        encoded = self.tokenizer(
            batch["tokens"] if has_words else batch["text"],
            batch.get("text_pair"),
            truncation=True,
            max_length=self.max_length,
            is_split_into_words=has_words,
        )
        rows = dict(encoded)
        self.tally.count(encoded)
        labels = [self.labels[index] for index in indices]
        rows["labels"] = (
            [self._align(encoded.word_ids(i), row) for i, row in enumerate(labels)] if has_words else labels
        )
        return rows

    def _align(self, word_ids: list[int | None], labels: list[int]) -> list[int]:
        """Label each word's first piece; words are counted by the tokenizer, so one of no piece shifts nothing."""
        aligned, previous = [], None
        for word in word_ids:
            aligned.append(IGNORED if word is None or word == previous else labels[word])
            previous = word
        self.tally.num_words_lost += len(labels) - len({word for word in word_ids if word is not None})
        return aligned


def tokenize_texts(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None) -> Dataset:
    """Turn texts into rows for masked language modelling: `input_ids`, `attention_mask` and `special_tokens_mask`.

    A text of more than `max_length` tokens becomes several rows. Texts of no token are dropped and counted.
    """
    limit = usable_length(tokenizer, max_length)
    _require_fast(tokenizer)

    def encode(batch: dict[str, list]) -> dict[str, list]:
        encoded = tokenizer(
            batch["text"],
            truncation=True,
            max_length=limit,
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
        )
        encoded.pop("overflow_to_sample_mapping")
        kept = [row for row, mask in enumerate(encoded["special_tokens_mask"]) if not all(mask)]
        return {name: [values[row] for row in kept] for name, values in encoded.items()}

    rows = dataset.map(encode, batched=True, remove_columns=dataset.column_names, desc="Tokenizing")
    if not len(rows):
        raise ValueError(f"none of the {len(dataset)} texts has a token; check the texts and the tokenizer")
    return rows


def _require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.is_fast:
        raise TypeError(
            f"{type(tokenizer).__name__} is a tokenizer in Python, which does not tell words and cuts apart; load it "
            "by AutoTokenizer, or train one with scripts/train_tokenizer.py"
        )
