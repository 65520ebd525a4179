"""A fast tokenizer from the parts of a SentencePiece unigram model: pieces with scores, and a map of characters.

- Every character goes through the map (`Ａ` -> `A`, a tab -> a space, a control character -> nothing), runs of spaces
  become one, a space before a word is written `▁` and belongs to it, and a text begins with one.
- Of all ways to cut a word into pieces the likeliest one is taken (Kudo 2018, https://arxiv.org/abs/1804.10959).
- One text is `<s> a </s>`, a pair `<s> a </s> </s> b </s>`, as in XLM-RoBERTa.
- The map becomes the normaliser that `tokenizers` has for SentencePiece files. It reads a table that is made here: the
  UTF-8 bytes of the characters as a tree, in a double array (Aoe 1989, https://doi.org/10.1109/32.31365).
"""

import struct
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MASK = "<mask>"
# How a unit of the double array is packed: label in the low 8 bits, then these.
HAS_LEAF, OFFSET_SHIFT, IS_LEAF = 1 << 8, 10, 1 << 31
# Offsets have 21 bits; a wider form exists and is not needed by maps of some thousand characters.
MOST_UNITS = 1 << 21


def unigram_tokenizer(
    pieces: Sequence[tuple[str, float]],
    special_ids: Mapping[str, int],
    character_map: Mapping[str, str],
    *,
    max_length: int,
) -> PreTrainedTokenizerFast:
    """Build the tokenizer.

    Args:
        pieces: Text and log-probability of each, in the order of their ids.
        special_ids: `bos_token_id`, `eos_token_id`, `pad_token_id`, `unk_token_id`.
        character_map: Replacement of each character that has one.
        max_length: Longest input of the model in tokens; saved as `model_max_length`.
    """
    names = {name.removesuffix("_id"): pieces[number][0] for name, number in special_ids.items()}
    if any(text == MASK for text, _ in pieces):
        names["mask_token"] = MASK
    # The space before a masked word belongs to the word.
    special = {
        name: AddedToken(text, special=True, normalized=False, lstrip=text == MASK) for name, text in names.items()
    }
    bos, eos = names["bos_token"], names["eos_token"]

    tokenizer = Tokenizer(models.Unigram(list(pieces), unk_id=special_ids["unk_token_id"]))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(character_table(character_map)), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        pair=f"{bos} $A {eos} {eos} $B {eos}",
        special_tokens=[(bos, special_ids["bos_token_id"]), (eos, special_ids["eos_token_id"])],
    )
    tokenizer.add_special_tokens(list(special.values()))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        padding_side="right",
        truncation_side="right",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        cls_token=special["bos_token"],
        sep_token=special["eos_token"],
        **special,
    )


def character_table(character_map: Mapping[str, str]) -> bytes:
    """Pack a map of characters as SentencePiece does: size of the double array, the array, the replacements.

    A node of the tree is a unit of the array; its children lie at its base XOR their byte. A character ends in a child
    of byte 0, which holds where its replacement begins among the replacements; each of those ends with a zero byte.
    """
    texts, begins = bytearray(), {}
    for replacement in character_map.values():
        if replacement not in begins:
            begins[replacement] = len(texts)
            texts += replacement.encode() + b"\0"
    children: dict[bytes, dict[int, int | None]] = {b"": {}}  # byte -> begin of the replacement; None: a node below
    for character, replacement in character_map.items():
        if character == "\0":  # ends every reader's search; it has no place in a text either
            continue
        key = character.encode()
        for end in range(len(key)):
            children.setdefault(key[:end], {})[key[end]] = None
        children.setdefault(key, {})[0] = begins[replacement]
    bases = _place(children)

    # A reader steps to base XOR byte before it looks whether a child is there: the last block must be whole.
    units = [0] * ((max(bases.values(), default=0) | 0xFF) + 1)
    places = {b"": 0}
    for node in sorted(children, key=len):
        place, base = places[node], bases[node]
        units[place] |= (place ^ base) << OFFSET_SHIFT | (HAS_LEAF if 0 in children[node] else 0)
        for byte, begin in children[node].items():
            if begin is None:
                places[node + bytes([byte])] = base ^ byte
                units[base ^ byte] = byte
            else:
                units[base] = IS_LEAF | begin
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + bytes(texts)


def _place(children: Mapping[bytes, Mapping[int, object]]) -> dict[bytes, int]:
    """Give every node a base of its own such that no two children meet; nodes with many children choose first."""
    taken, bases = {0}, {}
    used = {0}  # two nodes of one base would find each other's children
    base, size = 1, 0
    for node in sorted(children, key=lambda node: -len(children[node])):
        # Nodes of one size go on where the last one found room; a smaller one fits into the gaps from the start.
        base, size = (base if len(children[node]) == size else 1), len(children[node])
        while base in used or any(base ^ byte in taken for byte in children[node]):
            base += 1
        bases[node] = base
        used.add(base)
        taken.update(base ^ byte for byte in children[node])
    if max(taken) >= MOST_UNITS:
        raise ValueError(f"the character map needs {max(taken)} units, and its table has room for {MOST_UNITS}")
    return bases
