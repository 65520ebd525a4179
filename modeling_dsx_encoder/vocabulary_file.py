"""A fast tokenizer as its tokenizer.json: read, given fewer pieces, loaded again.

The format is what the library promises to keep of a tokenizer's inner life. Ids stand in the model's vocabulary, in
the added tokens, in the post-processor and in the padding.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

KINDS = ("Unigram", "WordPiece", "BPE", "WordLevel")
# Written by older tokenizers beside tokenizer.json: they would hold the old pieces.
_OTHER_FILES = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "*.model")


def read_state(tokenizer: PreTrainedTokenizerFast) -> dict:
    """Give the tokenizer.json of a tokenizer that can be trimmed.

    Raises:
        TypeError: No fast tokenizer.
        ValueError: A kind or a part that is not known here, or a vocabulary that would not survive the disk.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}, but only a fast tokenizer (PreTrainedTokenizerFast) can be "
            "trimmed: load it with AutoTokenizer from a folder that has a tokenizer.json"
        )
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = state["model"].get("type")
    if kind not in KINDS:
        raise ValueError(
            f"the tokenizer's model is of the kind {kind!r}, but only {', '.join(KINDS)} can be trimmed: keep its "
            "vocabulary whole"
        )
    if state["model"].get("dropout"):
        raise ValueError(
            f"the tokenizer's BPE has dropout={state['model']['dropout']}: the same text falls into other pieces each "
            "time, so none can be known as unused. Set dropout to null in tokenizer.json first"
        )
    map_post_processor(state["post_processor"], lambda index: index)
    if vocabulary_of(state) != tokenizer.get_vocab():
        raise ValueError(
            "the tokenizer's ids are not those of its own tokenizer.json (an id is missing or taken twice): save it, "
            "load it, and compare get_vocab() before its vocabulary is trimmed"
        )
    return state


def vocabulary_of(state: dict) -> dict[str, int]:
    """Pieces and added tokens with their ids, as in tokenizer.json."""
    vocabulary = {piece: index for index, piece in model_pieces(state)}
    return vocabulary | {token["content"]: token["id"] for token in state["added_tokens"]}


def model_pieces(state: dict) -> list[tuple[int, str]]:
    """Ids and pieces of the model alone; some added tokens are among them, some not."""
    pieces = state["model"]["vocab"]
    if isinstance(pieces, dict):
        return [(index, piece) for piece, index in pieces.items()]
    return [(index, piece) for index, (piece, _) in enumerate(pieces)]


def unknown_id(state: dict) -> int | None:
    """Id of what stands for text without a piece; None where there is no such token."""
    model = state["model"]
    return model["unk_id"] if model["type"] == "Unigram" else vocabulary_of(state).get(model.get("unk_token"))


def merged_piece(state: dict, left: str, right: str) -> str:
    """What a merge makes: a part that goes on with a word loses its mark (`a` + `##b` = `ab`)."""
    return left + right[len(state["model"].get("continuing_subword_prefix") or "") :]


def plain_backend(state: dict) -> Tokenizer:
    """Make a tokenizer that cuts texts whole and pads none."""
    backend = Tokenizer.from_str(json.dumps(state))
    backend.no_truncation()
    backend.no_padding()
    return backend


def trimmed_state(state: dict, kept: Sequence[int]) -> dict:
    """Give a tokenizer.json of the kept ids alone, renumbered in their order."""
    new_ids = {old: new for new, old in enumerate(kept)}
    model = dict(state["model"])
    if model["type"] == "Unigram":
        model["vocab"] = [piece for index, piece in enumerate(model["vocab"]) if index in new_ids]
        model["unk_id"] = new_ids.get(model["unk_id"])
    else:
        model["vocab"] = {piece: new_ids[index] for piece, index in model["vocab"].items() if index in new_ids}
    if model["type"] == "BPE":
        model["merges"] = [merge for merge in model["merges"] if merged_piece(state, *merge) in model["vocab"]]
    padding = state["padding"] and state["padding"] | {"pad_id": new_ids[state["padding"]["pad_id"]]}
    return state | {
        "model": model,
        "added_tokens": [token | {"id": new_ids[token["id"]]} for token in state["added_tokens"]],
        "post_processor": map_post_processor(state["post_processor"], new_ids.__getitem__),
        "padding": padding,
    }


def map_post_processor(processor: dict | None, new_id: Callable[[int], int]) -> dict | None:
    """Give a post-processor's JSON with every id replaced.

    Raises:
        ValueError: A kind of post-processor that may hold ids nobody here knows of.
    """
    kind = processor and processor["type"]
    if kind in (None, "ByteLevel"):
        return processor
    if kind == "Sequence":
        return processor | {"processors": [map_post_processor(part, new_id) for part in processor["processors"]]}
    if kind == "TemplateProcessing":
        tokens = {
            name: token | {"ids": [new_id(index) for index in token["ids"]]}
            for name, token in processor["special_tokens"].items()
        }
        return processor | {"special_tokens": tokens}
    if kind in ("RobertaProcessing", "BertProcessing"):
        return processor | {name: [processor[name][0], new_id(processor[name][1])] for name in ("sep", "cls")}
    raise ValueError(
        f"the tokenizer's post-processor is of the kind {kind!r}, but only TemplateProcessing, RobertaProcessing, "
        "BertProcessing and ByteLevel can be renumbered: keep its vocabulary whole"
    )


def load_state(tokenizer: PreTrainedTokenizerFast, state: dict) -> PreTrainedTokenizerFast:
    """Make a tokenizer of the same class and settings from another tokenizer.json, by way of the disk.

    Raises:
        ValueError: The class does not take the vocabulary as it is written.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in [path for pattern in _OTHER_FILES for path in Path(folder).glob(pattern)]:
            path.unlink()
        Path(folder, "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
        trimmed = type(tokenizer).from_pretrained(folder)
    trimmed.name_or_path = tokenizer.name_or_path
    if trimmed.get_vocab() != vocabulary_of(state):
        raise ValueError(
            f"{type(tokenizer).__name__} numbers a trimmed vocabulary in its own way: load the tokenizer as "
            "PreTrainedTokenizerFast(tokenizer_file=...) and trim that, or keep the vocabulary whole"
        )
    return trimmed
