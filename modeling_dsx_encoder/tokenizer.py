"""Train a fast tokenizer for Chinese and English text; the saved folder loads with `AutoTokenizer` and needs no code.

- Three kinds of vocabulary over one way of cutting text:
  - `bpe` (take this when in doubt): pieces by frequency, and 256 byte pieces for everything else. Nothing becomes
    [UNK], the same text gives the same vocabulary, and training is fast. Chinese has a long tail of rare characters:
    as bytes they cost three tokens when they occur, instead of an embedding each that hardly learns, or their meaning.
  - `unigram`: pieces by likelihood, with the same 256 bytes. With learned Chinese words it takes several times as long
    as `bpe`, and its library sums in random order, so that two runs give a few other scores and numbers of pieces.
  - `wordpiece`: BERT's longest match with `##`. There are no bytes: every character of the training text gets a piece,
    any other one becomes [UNK] together with its word, and the round-trip report counts and names it.
- Text is normalised with NFKC (full-width forms become plain ones, `，` is `,`), on request in lower case.
- A word keeps the space before it (`" good"`), Chinese characters have none: joining the pieces gives the normalised
  text back (one space at the very start is not kept). A text that begins with a word gets that space too, so that a
  word is the same piece everywhere.
- Every digit, punctuation mark and emoji is a piece of its own; every Han character too, unless `split_cjk=False`
  (leave it True for token classification: labels of Chinese entities are given by character).
- [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4; one text is `[CLS] a [SEP]`, a pair `[CLS] a [SEP] b [SEP]`.
"""

import difflib
import json
import os
import string
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from .round_trip import BYTES, RoundTripReport, reiterable, round_trip_report, with_progress

logger = logging.get_logger(__name__)

KINDS = ("bpe", "unigram", "wordpiece")
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# SentencePiece's recommendation for languages with many characters; the rest is spelt in bytes.
BYTE_FALLBACK_COVERAGE = 0.9995
# Stands for the characters without a piece while training: Unicode reserves it for a program's own use.
PLACEHOLDER = "\ufdd0"
LETTER = r"[\p{L}\p{M}&&[^\p{Han}]]"
# A longer word is cut in two: WordPiece gives up at 100 characters, and a line of base64 must not stall training.
LONGEST_WORD = 64


def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: str = "bpe",
    vocab_size: int = 30522,
    lowercase: bool = False,
    split_cjk: bool = True,
    min_frequency: int = 2,
    alphabet_coverage: float | None = None,
    max_length: int = 512,
    token_type_ids: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of exactly `vocab_size` pieces.

    Args:
        texts: read twice; an iterator is held in memory.
        kind: "bpe", "unigram" or "wordpiece"; the head of this file says what each is good for.
        vocab_size: pieces in all, with the 5 special tokens and the 256 bytes of bpe and unigram.
        split_cjk: every Han character is a piece of its own; False learns words, and sequences get a third shorter.
        min_frequency: how often a piece of several characters must occur (unigram goes by likelihood instead).
        alphabet_coverage: share of the running text whose characters are sure of a piece, the frequent ones first.
            Default: 0.9995 for bpe and unigram, which spell the rest in bytes; 1.0 for wordpiece, which loses it.
        max_length: longest input of the model in tokens, special tokens included; saved as `model_max_length`.
        token_type_ids: also return token types, for a model with `type_vocab_size` of 2 or more.
    """
    _check_numbers(kind, vocab_size, min_frequency, alphabet_coverage, max_length)
    texts = reiterable(texts)
    normalizer = _normalizer(lowercase)
    counts = _count_characters(texts, normalizer)
    cutter = pre_tokenizers.Split(Regex(_word_pattern(split_cjk)), "isolated")
    alphabet = _choose_alphabet(counts, kind, vocab_size, alphabet_coverage, cutter)

    rare = [character for character, _ in _most_frequent(counts) if character not in alphabet]
    missing = {ord(character): PLACEHOLDER for character in rare}
    reserved = [*SPECIAL_TOKENS, *_fixed_pieces(kind, alphabet)]
    trainer = _trainer(kind, vocab_size + bool(missing), min_frequency, reserved, list(alphabet))
    learner = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE())
    if kind == "wordpiece":
        learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.pre_tokenizer = cutter
    rows = (normalizer.normalize_str(text).translate(missing) for text in texts)
    learner.train_from_iterator(rows, trainer, length=len(texts) if hasattr(texts, "__len__") else None)

    tokenizer = Tokenizer(_exact_model(learner, kind, vocab_size, set(reserved) | alphabet.keys(), rare))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, cutter
    return _wrap(tokenizer, kind, max_length, token_type_ids)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | os.PathLike) -> Path:
    """Write the tokenizer's files into `folder`; a run that is stopped leaves whole files only."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer-") as temporary:
        tokenizer.save_pretrained(temporary)
        for file in sorted(Path(temporary).iterdir()):
            os.replace(file, folder / file.name)
    return folder


def _check_numbers(kind, vocab_size, min_frequency, alphabet_coverage, max_length) -> None:
    """Refuse settings that no training could meet."""
    if kind not in KINDS:
        near = difflib.get_close_matches(str(kind).lower(), KINDS, n=1)
        raise ValueError(
            f"kind={kind!r} is not one of {', '.join(KINDS)}: "
            + (f"did you mean {near[0]!r}?" if near else "take 'bpe'")
        )
    for name, value, smallest in (
        ("vocab_size", vocab_size, len(SPECIAL_TOKENS) + (0 if kind == "wordpiece" else len(BYTES)) + 2),
        ("min_frequency", min_frequency, 1),
        ("max_length", max_length, 4),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}, but it must be a whole number")
        if value < smallest:
            raise ValueError(f"{name}={value} is too small for kind={kind!r}: give at least {smallest}")
    if alphabet_coverage is not None and not 0.0 < alphabet_coverage <= 1.0:
        raise ValueError(f"alphabet_coverage={alphabet_coverage} lies outside (0, 1]: give a share such as 0.999")


def _normalizer(lowercase: bool) -> normalizers.Normalizer:
    """NFKC, then a space before a text that begins with a word."""
    first_word = [normalizers.Prepend(" "), normalizers.Replace(Regex(rf"^ (?!{LETTER})"), "")]
    return normalizers.Sequence([normalizers.NFKC(), *([normalizers.Lowercase()] if lowercase else []), *first_word])


def _word_pattern(split_cjk: bool) -> str:
    """A word with the space before it, or (without `split_cjk`) a run of Han characters, or any one character."""
    word = rf" ?{LETTER}{{1,{LONGEST_WORD}}}"
    han_run = "" if split_cjk else rf"\p{{Han}}{{1,{LONGEST_WORD}}}|"
    return rf"{word}|{han_run}[\s\S]"


def _count_characters(texts: Iterable[str], normalizer: normalizers.Normalizer) -> Counter:
    """Count the characters of the normalised texts, and refuse what is no text."""
    counts = Counter()
    for index, text in enumerate(with_progress(texts, "counting characters")):
        if not isinstance(text, str):
            raise TypeError(
                f"text {index} is {str(text)[:80]!r}, a {type(text).__name__}, but each text must be a str: drop "
                "empty cells and convert numbers before training"
            )
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"text {index} holds half a character ({error.reason}) at position {error.start}, but it must be "
                    "valid Unicode: read the file with its right encoding, or with errors='replace'"
                ) from error
        counts.update(normalizer.normalize_str(text))
    if not any(not character.isspace() for character in counts):
        raise ValueError("texts holds no text, but a tokenizer learns from it: check the path and the column's name")
    return counts


def _most_frequent(counts: Counter) -> list[tuple[str, int]]:
    """Characters with their counts, in one order for every run."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _choose_alphabet(counts: Counter, kind: str, vocab_size: int, coverage: float | None, cutter) -> dict[str, bool]:
    """The characters that get a piece, the frequent ones first, and whether each may stand inside a word."""
    share = coverage or (1.0 if kind == "wordpiece" else BYTE_FALLBACK_COVERAGE)
    remaining = share * counts.total()
    # The space always: words start with it. WordPiece also has ASCII, which the others could spell in bytes.
    chosen = dict.fromkeys(string.printable[:95] if kind == "wordpiece" else " ")
    for character, count in _most_frequent(counts):
        if remaining <= 0:
            break
        if character == PLACEHOLDER:  # somebody's text really has it
            continue
        chosen[character] = None
        remaining -= count
    if kind != "wordpiece":
        # A quarter is left for words: a rare character as bytes costs two tokens more, a word without a piece many.
        room = (vocab_size - len(SPECIAL_TOKENS) - len(BYTES)) * 3 // 4
        return dict.fromkeys(list(chosen)[:room], False)
    # What is not cut apart when doubled may follow another character, so it needs its ## piece too.
    alphabet = {character: len(cutter.pre_tokenize_str(character * 2)) == 1 for character in chosen}
    needed = len(SPECIAL_TOKENS) + len(alphabet) + sum(alphabet.values())
    if needed > vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} is smaller than the alphabet alone: {len(alphabet)} characters of these texts "
            f"need {needed} pieces (special tokens and ## forms included). Give vocab_size={needed} or more; or set "
            f"alphabet_coverage below {share} to lose the rarest characters; or take kind='bpe', which loses none"
        )
    if share < 1.0:
        logger.warning(
            f"wordpiece with alphabet_coverage={share}: up to {1 - share:.3%} of the characters become [UNK]"
        )
    return alphabet


def _fixed_pieces(kind: str, alphabet: dict[str, bool]) -> list[str]:
    """Pieces that are in the vocabulary whatever the text: bytes, or the ## forms of characters."""
    return (
        [f"##{character}" for character, inside in alphabet.items() if inside] if kind == "wordpiece" else list(BYTES)
    )


def _trainer(kind: str, vocab_size: int, min_frequency: int, reserved: list[str], alphabet: list[str]):
    """The library's trainer; `reserved` go in as its special tokens, which gives them their ids in this order."""
    shared = {
        "vocab_size": vocab_size,
        "special_tokens": reserved,
        "initial_alphabet": alphabet,
        "show_progress": logging.is_progress_bar_enabled(),
    }
    if kind == "unigram":
        return trainers.UnigramTrainer(unk_token="[UNK]", **shared)
    if kind == "bpe":
        return trainers.BpeTrainer(min_frequency=min_frequency, **shared)
    # Left to itself the trainer numbers the ## characters in the random order of a hash table, and ties follow it.
    return trainers.WordPieceTrainer(min_frequency=min_frequency, **shared)


def _exact_model(learner: Tokenizer, kind: str, vocab_size: int, fixed: set[str], rare: list[str]) -> models.Model:
    """Make the model of what was learned, without the placeholder and with exactly `vocab_size` pieces.

    Args:
        fixed: pieces that stay whatever happens.
        rare: characters without a piece; where the texts give too few pieces they fill the vocabulary (not in
            wordpiece, where the caller chose to lose them).
    """
    learned = json.loads(learner.to_str())["model"]
    scores = dict(learned["vocab"])  # piece -> id; for unigram piece -> score
    if kind == "unigram":
        # The trainer sums in the random order of a hash table: rounding the scores hides most of it.
        scores = {piece: round(score, 6) for piece, score in scores.items()}
        first = [*SPECIAL_TOKENS, *BYTES]
        pieces = first + sorted(scores.keys() - set(first), key=lambda piece: (-scores[piece], piece))
    else:
        pieces = sorted(scores, key=scores.get)
    pieces = [piece for piece in pieces if piece != PLACEHOLDER]
    optional = [piece for piece in pieces if piece not in fixed]  # the trainers put the best first
    dropped = set(optional[vocab_size - len(fixed) :])
    pieces = [piece for piece in pieces if piece not in dropped]
    if kind != "wordpiece":
        pieces += [character for character in rare if character != PLACEHOLDER][: vocab_size - len(pieces)]
    if len(pieces) < vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} cannot be filled: these texts give {len(pieces)} pieces. Give "
            f"vocab_size={len(pieces)} or less; or more text; or min_frequency=1; or split_cjk=False to learn words"
        )
    if kind == "unigram":
        lowest = min(scores.values()) - 1.0
        return models.Unigram([(piece, scores.get(piece, lowest)) for piece in pieces], unk_id=1, byte_fallback=True)
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    if kind == "wordpiece":
        return models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD + 1)
    merges = [(a, b) for a, b in learned["merges"] if a + b in vocabulary]
    return models.BPE(vocabulary, merges, byte_fallback=True, unk_token="[UNK]")


def _wrap(tokenizer: Tokenizer, kind: str, max_length: int, token_type_ids: bool) -> PreTrainedTokenizerFast:
    """Add what stands around the model: special tokens, template, decoder, and the settings that are saved."""
    special = [AddedToken(token, special=True, normalized=False, lstrip=token == "[MASK]") for token in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special)
    template = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    # Despite its name this one only takes the space off a word's offsets, so that an entity does not start with it.
    trim = processors.ByteLevel(trim_offsets=True, add_prefix_space=True)
    tokenizer.post_processor = processors.Sequence([trim, template])
    joined = [decoders.Replace(Regex("^##"), "")] if kind == "wordpiece" else [decoders.ByteFallback()]
    tokenizer.decoder = decoders.Sequence([*joined, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        padding_side="right",
        truncation_side="right",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", *(["token_type_ids"] if token_type_ids else []), "attention_mask"],
        **dict(zip(names, special, strict=True)),
    )


__all__ = ["KINDS", "SPECIAL_TOKENS", "RoundTripReport", "round_trip_report", "save_tokenizer", "train_tokenizer"]
