"""Which pieces of a fast tokenizer have to stay for given texts, and whether the texts then fall into the same ones.

The texts must fall into the same pieces afterwards, so that more is kept than what shows up in them:

- always: added and special tokens, what the post-processor puts around a text, every piece of one character (for
  WordPiece also behind `##`; for byte-level BPE also a character of several bytes), byte pieces such as `<0x0A>`, and
  the first few ids. New texts can still be spelt.
- Unigram takes the most probable path. Pieces that are on no best path can go, and the paths stay the best; one piece
  of the lowest score stays, because the score of unknown characters hangs on it.
- WordPiece takes the longest match. A word that fails becomes the unknown token, and the matches before the failure
  decide on that without being seen: every piece that occurs in such a word stays.
- BPE applies the merge that was learned first. Merges that make a kept piece stay, and so do their parts, which may
  need merges in turn; without the others each step has the same choice of the first.
- WordLevel looks whole words up.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from .round_trip import with_progress
from .vocabulary_file import map_post_processor, merged_piece, model_pieces, plain_backend, unknown_id

# RoBERTa's family counts on <pad> = 1 and <unk> = 3, in its classes and in its tables of positions.
NUM_FIRST_IDS = 8
BATCH_SIZE = 1000
_BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclass
class Usage:
    """What texts use of a tokenizer: ids, how many tokens that were, and words that became the unknown token."""

    ids: set[int] = field(default_factory=set)
    num_texts: int = 0
    num_tokens: int = 0
    num_unknown: int = 0
    unknown_words: set[str] = field(default_factory=set)


def count_usage(state: dict, texts: Iterable[str], prompts: Sequence[str] = ()) -> Usage:
    """Cut whole texts, also behind what may stand before them, and note what they use."""
    # Without post-processor: it may move the edges of words, and its tokens are kept anyway.
    backend = plain_backend(state | {"post_processor": None})
    unknown, usage = unknown_id(state), Usage()
    beginnings = _beginnings(backend, prompts)
    for batch in _batches(with_progress(texts, "pieces in use")):
        for place, text in enumerate(batch, start=usage.num_texts):
            _check_text(text, place)
        usage.num_texts += len(batch)
        for beginning in beginnings:
            variants = [beginning + text for text in batch]
            for text, encoding in zip(variants, backend.encode_batch_fast(variants), strict=True):
                ids = encoding.ids
                usage.ids.update(ids)
                if not beginning:
                    usage.num_tokens += len(ids)
                    usage.num_unknown += ids.count(unknown)
                if unknown in ids and state["model"]["type"] == "WordPiece":
                    usage.unknown_words.update(_unknown_words(backend, text, unknown))
    return usage


def _beginnings(backend: Tokenizer, prompts: Sequence[str]) -> list[str]:
    """What texts are tried behind: nothing, prompts, and a space where the tokenizer tells a word inside a text."""
    alone, inside = (backend.encode_batch([space + probe for probe in "x好5!"]) for space in ("", " "))
    is_told = any(one.ids != other.ids for one, other in zip(alone, inside, strict=True))
    return ["", *([" "] if is_told else []), *prompts]


def _unknown_words(backend: Tokenizer, text: str, unknown: int) -> set[str]:
    """Words of a text, normalised, that became the unknown token."""
    encoding = backend.encode(text)
    spans = {span for index, span in zip(encoding.ids, encoding.offsets, strict=True) if index == unknown}
    words = {text[start:end] for start, end in spans}
    return {backend.normalizer.normalize_str(word) for word in words} if backend.normalizer else words


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while batch := list(islice(texts, BATCH_SIZE)):
        yield batch


def _check_text(text: object, place: int) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text {place} is {str(text)[:80]!r}, a {type(text).__name__}, but each text must be a str")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text {place} holds half a character ({error.reason}) at position {error.start}, but it must be "
                "valid Unicode: read the file with its right encoding, or with errors='replace'"
            ) from error


def choose_ids(state: dict, usage: Usage, required: Iterable[int]) -> list[int]:
    """Ids that stay, in their order: what is used, what it hangs on, and what stays always.

    Args:
        required: further ids, such as those that the model's configuration names.
    """
    kept = {*usage.ids, *required, *(token["id"] for token in state["added_tokens"])}
    kept |= set(range(NUM_FIRST_IDS)) | {unknown_id(state)}
    map_post_processor(state["post_processor"], lambda index: kept.add(index) or index)
    if state["padding"]:
        kept.add(state["padding"]["pad_id"])
    pieces = dict(model_pieces(state))
    is_alphabet = _alphabet_test(state)
    kept.update(index for index, piece in pieces.items() if is_alphabet(piece))
    kind = state["model"]["type"]
    if kind == "Unigram":
        kept.add(min(pieces, key=lambda index: state["model"]["vocab"][index][1]))
    elif kind == "WordPiece":
        kept |= _parts_of_words(state, usage.unknown_words)
    elif kind == "BPE":
        kept |= _parts_of_merges(state, kept)
    return sorted(kept & {*pieces, *(token["id"] for token in state["added_tokens"])})


def _alphabet_test(state: dict) -> Callable[[str], bool]:
    """A test for pieces of one character, and for bytes."""
    model = state["model"]
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    is_byte_level = '"ByteLevel"' in json.dumps([state["normalizer"], state["pre_tokenizer"]])
    decoder = decoders.ByteLevel()

    def test(piece: str) -> bool:
        if len(piece) <= 1 or _BYTE.fullmatch(piece):
            return True
        bare = piece.removeprefix(prefix).removesuffix(suffix)
        if len(bare) <= 1:
            return True
        # A character of several bytes; a part of one decodes to the replacement character.
        decoded = decoder.decode([bare]) if is_byte_level and len(bare) <= 4 else ""
        return len(decoded) == 1 and decoded != "\ufffd"

    return test


def _parts_of_words(state: dict, words: Iterable[str]) -> set[int]:
    """Every piece that occurs in these words; past a limit WordPiece does not look into a word."""
    model = state["model"]
    vocabulary, prefix = model["vocab"], model["continuing_subword_prefix"]
    found = set()
    for word in words:
        # Some room: the word may have got a space in front that does not count.
        if len(word) > model["max_input_chars_per_word"] + 1:
            continue
        for start in range(len(word)):
            for end in range(start + 1, len(word) + 1):
                part = word[start:end]
                found |= {vocabulary.get(part), vocabulary.get(prefix + part)}
    return found - {None}


def _parts_of_merges(state: dict, kept: set[int]) -> set[int]:
    """Ids of all parts that kept pieces can be merged from, and of the parts of those."""
    vocabulary, parts = state["model"]["vocab"], {}
    for left, right in state["model"]["merges"]:
        merged = vocabulary[merged_piece(state, left, right)]
        parts.setdefault(merged, []).extend((vocabulary[left], vocabulary[right]))
    found, waiting = set(), list(kept)
    while waiting:
        for part in parts.get(waiting.pop(), ()):
            if part not in found:
                found.add(part)
                waiting.append(part)
    return found


def check_same_pieces(
    state: dict, trimmed: PreTrainedTokenizerFast, kept: Sequence[int], texts: Iterable[str], prompts: Sequence[str]
) -> None:
    """Cut all texts with both tokenizers, special tokens included, and some pairs of them.

    Raises:
        ValueError: Naming the first text that falls into other pieces.
    """
    before, after = plain_backend(state), plain_backend(json.loads(trimmed.backend_tokenizer.to_str()))
    for batch in _batches(with_progress(texts, "checking pieces")):
        for beginning in _beginnings(before, prompts):
            variants = [*(beginning + text for text in batch), (batch[0], batch[-1])]
            both = zip(before.encode_batch_fast(variants), after.encode_batch_fast(variants), strict=True)
            for text, (old, new) in zip(variants, both, strict=True):
                if old.ids != [kept[index] for index in new.ids]:
                    found = [after.id_to_token(index) for index in new.ids[:20]]
                    wanted = [before.id_to_token(index) for index in old.ids[:20]]
                    raise ValueError(
                        f"with the trimmed vocabulary {str(text)[:60]!r} falls into {found}, not into {wanted}: this "
                        "tokenizer cannot be trimmed; keep its vocabulary whole"
                    )
