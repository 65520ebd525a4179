"""Encode, decode, compare: what a tokenizer loses of a text, and how long it makes it.

- `round_trip_report`: any fast tokenizer, any texts -> figures, examples and differences
- `RoundTripReport.table()`: the same for the terminal
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def reiterable(texts: Iterable[str]) -> Iterable[str]:
    """Texts that can be read more than once."""
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"texts is one {type(texts).__name__}, not several texts: put it in a list")
    return list(texts) if isinstance(texts, Iterator) else texts


def with_progress(texts: Iterable[str], what: str) -> Iterable[str]:
    """The texts under a progress bar, unless transformers' bars are switched off."""
    return logging.tqdm(texts, desc=what, unit=" texts", leave=False)


@dataclass
class RoundTrip:
    """One text, its tokens, and what they decode to."""

    text: str
    tokens: list[str]
    decoded: str


@dataclass
class RoundTripReport:
    """What is left of texts that were encoded and decoded again, compared with the normalised texts."""

    num_texts: int = 0
    num_exact: int = 0
    num_characters: int = 0
    num_tokens: int = 0
    num_unknown: int = 0
    num_bytes: int = 0
    num_too_long: int = 0
    max_length: int = 0
    examples: list[RoundTrip] = field(default_factory=list)
    differences: list[RoundTrip] = field(default_factory=list)
    lost: Counter = field(default_factory=Counter)  # what became [UNK], and how often

    @property
    def exact_share(self) -> float:
        """Share of the texts that came back as they were."""
        return self.num_exact / max(self.num_texts, 1)

    @property
    def unknown_rate(self) -> float:
        """Share of the tokens that are [UNK]: text that is lost."""
        return self.num_unknown / max(self.num_tokens, 1)

    @property
    def byte_rate(self) -> float:
        """Share of the tokens that are single bytes: text that is kept, but spelt out."""
        return self.num_bytes / max(self.num_tokens, 1)

    @property
    def tokens_per_character(self) -> float:
        """Length of the sequences: 1.0 is one token for each character."""
        return self.num_tokens / max(self.num_characters, 1)

    def table(self) -> Table:
        """The figures, some texts as they are cut, and some that did not come back whole."""
        table = Table(title="Round trip: text -> tokens -> text")
        table.add_column("what", no_wrap=True)
        table.add_column("value", overflow="fold")
        table.add_row("texts", f"{self.num_texts:,}")
        table.add_row("came back exactly", f"{self.num_exact:,} ({self.exact_share:.2%})")
        table.add_row("unknown tokens (text lost)", f"{self.num_unknown:,} ({self.unknown_rate:.3%})")
        table.add_row("byte tokens (text kept)", f"{self.num_bytes:,} ({self.byte_rate:.3%})")
        table.add_row("tokens per character", f"{self.tokens_per_character:.3f}")
        table.add_row(f"longer than {self.max_length} tokens", f"{self.num_too_long:,} (will be cut)")
        if self.lost:
            most = ", ".join(f"{piece} ({count:,})" for piece, count in self.lost.most_common(10))
            table.add_row("lost most often", Text(most))
        # Text, not str: rich would read "[UNK]" as markup.
        for trip in self.examples:
            table.add_row("cut as", Text(_shortened("|".join(trip.tokens))))
        for trip in self.differences:
            table.add_row("differs", Text(f"{_shortened(trip.text)}\n-> {_shortened(trip.decoded)}"))
        return table


def round_trip_report(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], *, num_shown: int = 3, batch_size: int = 1000
) -> RoundTripReport:
    """Encode and decode `texts`, and count what was lost.

    Args:
        num_shown: how many examples, and how many differences, the report keeps.
        batch_size: texts encoded at a time; has no influence on the figures.
    """
    texts = reiterable(texts)
    # A copy: the tokenizer may still cut or pad as its last caller wished.
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    report = RoundTripReport(max_length=tokenizer.model_max_length)
    byte_ids = {backend.token_to_id(piece) for piece in BYTES} - {None}
    longest = tokenizer.model_max_length - tokenizer.num_special_tokens_to_add()
    for batch in _batches(with_progress(texts, "round trip"), batch_size):
        encodings = backend.encode_batch(batch, add_special_tokens=False)
        decoded_batch = backend.decode_batch([encoding.ids for encoding in encodings], skip_special_tokens=False)
        for text, encoding, decoded in zip(batch, encodings, decoded_batch, strict=True):
            expected = backend.normalizer.normalize_str(text) if backend.normalizer else text
            trip = RoundTrip(text, encoding.tokens, decoded)
            report.num_texts += 1
            report.num_characters += len(text)
            report.num_tokens += len(encoding)
            unknown = [index for index, piece in enumerate(encoding.ids) if piece == tokenizer.unk_token_id]
            report.num_unknown += len(unknown)
            report.lost.update(text[slice(*encoding.offsets[index])].strip() for index in unknown)
            report.num_bytes += sum(index in byte_ids for index in encoding.ids)
            report.num_too_long += len(encoding) > longest
            if len(report.examples) < num_shown:
                report.examples.append(trip)
            if decoded == expected.removeprefix(" "):
                report.num_exact += 1
            elif len(report.differences) < num_shown:
                report.differences.append(trip)
    return report


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    batch = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _shortened(text: str, length: int = 72) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
