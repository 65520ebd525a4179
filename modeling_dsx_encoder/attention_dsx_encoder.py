"""Masks, layouts and the eager back end of the DSX encoder's attention.

- `read_attention_mask`: every accepted form of `attention_mask`, read once into booleans.
- `RectangularLayout` and `FlatLayout`: where each token of a batch stands. Nothing else in the encoder knows about
  padding, windows and packed rows; embeddings, norms and feed-forward work on any leading axes.
  `layouts_dsx_encoder.py` adds the layout of variable-length kernels and chooses.
- `eager_attention_forward`: softmax(Q K^T / sqrt(D)) V, step by step, when the weights are wanted.

Shapes: B batch, L sequence, T real tokens of the whole batch, E hidden_size, H heads, K key-value heads, D = E/H head
size.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers.masking_utils import create_bidirectional_mask, create_bidirectional_sliding_window_mask

from .configuration_dsx_encoder import DsxEncoderConfig
from .positions_dsx_encoder import PositionScheme, is_traced

# An additive mask hides a key with a large negative number; -10000 is the smallest size in use (the first BERT).
HIDDEN_SCORE = -1.0e4


class ReadMask(NamedTuple):
    """An attention mask of any accepted form, as booleans.

    `tokens` `(B, L)` says which tokens are real, None: all. `pairs` `(B, 1|H, L, L)` says which query may see which
    key, None where `tokens` says it all. `scores` is the additive form as given.
    """

    tokens: torch.Tensor | None = None
    pairs: torch.Tensor | None = None
    scores: torch.Tensor | None = None


def read_attention_mask(mask: torch.Tensor | None, batch_size: int, length: int, num_heads: int) -> ReadMask:
    """Read a `(B, L)`, `(B, L, L)` or `(B, 1|H, L, L)` mask.

    Two axes: any dtype, 0 is padding. Three axes: boolean or 0-1 integers, row i says which keys query i may see.
    Four axes: the same, or floats that are added to the scores. A token that no query may see is padding.

    Raises:
        TypeError: Not a tensor, or floats in the three-axis form, which would be ambiguous.
        ValueError: A shape that does not fit the batch.
    """
    if mask is None:
        return ReadMask()
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attention_mask must be a torch.Tensor or None, got {type(mask).__name__}.")
    expected = {2: (batch_size, length), 3: (batch_size, length, length), 4: (batch_size, num_heads, length, length)}
    fits = mask.ndim in expected and all(
        size == wanted or (size == 1 and mask.ndim > 2 and axis < mask.ndim - 2)
        for axis, (size, wanted) in enumerate(zip(mask.shape, expected[mask.ndim], strict=True))
    )
    if not fits:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but the inputs have batch {batch_size} and length "
            f"{length}: give ({batch_size}, {length}), ({batch_size}, {length}, {length}) or "
            f"({batch_size}, 1 or {num_heads}, {length}, {length})."
        )
    if mask.ndim == 2:
        if mask.is_floating_point() and not is_traced() and bool((mask < 0).any()):
            raise ValueError(
                f"attention_mask with two axes holds 1 for tokens and 0 for padding, got {mask.min().item()}: an "
                "additive mask takes four axes, mask[:, None, None, :].expand(-1, 1, length, -1)."
            )
        tokens = mask != 0
        return ReadMask(tokens=None if not is_traced() and bool(tokens.all()) else tokens)
    if mask.ndim == 3 and mask.is_floating_point():
        raise TypeError(
            f"attention_mask with three axes must be boolean or 0-1 integers, got {mask.dtype}: pass mask.bool(), or "
            "an additive mask with four axes, mask[:, None]."
        )
    mask = mask.unsqueeze(1) if mask.ndim == 3 else mask  # (B, 1|H, L, L)
    scores = mask if mask.is_floating_point() else None
    pairs = (mask != 0) if scores is None else mask > HIDDEN_SCORE
    tokens = pairs.flatten(1, 2).any(dim=1).expand(batch_size, length)  # (B, L): seen by at least one query
    return ReadMask(tokens=None if not is_traced() and bool(tokens.all()) else tokens, pairs=pairs, scores=scores)


def check_edges(edges: torch.Tensor, batch_size: int, length: int) -> None:
    """Refuse cumulative lengths that do not cut the rows, laid end to end, into sequences.

    Raises:
        ValueError: Naming the lengths, the rule and what to pass.
    """
    total, given = batch_size * length, edges.tolist()
    broken = None
    if edges.is_floating_point() or edges.dtype == torch.bool:
        broken = f"be whole numbers, got {edges.dtype}"
    elif edges.ndim != 1 or given[:1] != [0] or given[-1] != total:
        broken = f"begin with 0 and end with {total}, the number of tokens in {batch_size} row(s) of {length}"
    elif not bool((edges.diff() > 0).all()):
        broken = "grow from each to the next: a sequence has at least one token"
    elif not set(range(0, total, length)) <= set(given):
        broken = f"hold the start of each row, a multiple of {length}: no sequence goes on in the next row"
    if broken:
        raise ValueError(
            f"cu_seq_lens_q={given} must {broken}; pass [0, l1, l1 + l2, ...] for sequences of l1, l2, ... tokens, or "
            "position_ids that restart at 0 in its place."
        )


def sequence_starts(position_ids, cu_seq_lens, tokens, batch_size, length, device) -> torch.Tensor | None:
    """Where the sequences of packed rows begin, `(B, L)`; None when every row is one sequence.

    Rows are packed when positions fall back to 0 inside a row, or when cumulative lengths over the row(s), laid end to
    end, are given (`DataCollatorWithFlattening`). The positions of padding are often 0 and mean nothing.
    """
    if cu_seq_lens is not None:
        edges = torch.as_tensor(cu_seq_lens).to(device)
        if not is_traced():
            check_edges(edges, batch_size, length)
        edges = edges.long()
        starts = torch.zeros(batch_size * length, dtype=torch.bool, device=device)
        return starts.index_fill(0, edges[:-1], True).view(batch_size, length)
    if position_ids is None:
        return None
    position_ids = position_ids.expand(batch_size, length)
    starts = position_ids == 0
    if not is_traced() and not bool(starts[:, 1:].any()):
        return None
    if tokens is None:
        return starts
    # A hidden 0 counts where the next real token does not go on from the last one.
    last = torch.arange(length, device=device).where(tokens, 0).cummax(1).values
    last = nn.functional.pad(last[:, :-1], (1, 0))  # (B, L): place of the last real token before
    number = starts.cumsum(1)
    return tokens & (number > number.gather(1, last)) & (position_ids <= position_ids.gather(1, last))


def packs_several(starts: torch.Tensor, tokens: torch.Tensor | None) -> bool:
    """Whether a row holds real tokens of more than one sequence."""
    number = starts.cumsum(1)  # (B, L)
    if tokens is None:
        return bool((number[:, -1] > number[:, 0]).any())
    highest = number.masked_fill(~tokens, -1).amax(1)
    return bool((highest > number.masked_fill(~tokens, number.shape[1]).amin(1)).any())


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Dtype for sums and exponentials: half precision overflows, double stays."""
    return torch.promote_types(dtype, torch.float32)


def score_dtype(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """Dtype in which attention will compute its scores: that of autocast, or `dtype`, or the hidden states' own."""
    if torch.is_autocast_enabled(like.device.type):
        return torch.get_autocast_dtype(like.device.type)
    return dtype or like.dtype


def additive_mask(visible, bias, dtype, device) -> torch.Tensor | None:
    """What is added to the scores: the bias where a query may see a key, the dtype's minimum elsewhere."""
    if visible is None:
        return None if bias is None else bias.to(dtype)
    scores = torch.zeros((), dtype=dtype, device=device) if bias is None else bias.to(dtype)
    return torch.where(visible, scores, torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device))


def block_size(config: DsxEncoderConfig) -> int:
    """Queries of blocked local attention that share their keys: about the radius, for the least work per query."""
    return max(config.sliding_window, 64)


def uses_blocks(config: DsxEncoderConfig, length: int) -> bool:
    """Whether a sliding layer goes over a sequence in blocks: when those see at most half of its keys."""
    if config.sliding_window is None:
        return False
    return length >= 2 * (config.num_global_tokens + block_size(config) + 2 * config.sliding_window)


@dataclass
class RectangularLayout:
    """A padded batch `(B, L)`: which tokens are real, where they stand, and who may see whom.

    `ranks` numbers the real tokens of each sequence from 0, so that left padding, right padding and holes give the
    same positions and the same windows. Tensors with a batch axis of 1 hold for every row.
    """

    config: DsxEncoderConfig
    mask: ReadMask
    ranks: torch.Tensor  # (B|1, L)
    position_ids: torch.Tensor  # (B|1, L)
    sequences: torch.Tensor | None  # (B, L): which of the packed sequences a token belongs to
    attn_implementation: str
    batch_shape: tuple[int, int]  # (B, L)
    rotations: dict = field(default_factory=dict)
    blind: dict = field(default_factory=dict)
    attends_in: torch.dtype | None = None  # dtype of the attention, decided in `prepare`; None: that of its inputs

    @classmethod
    def from_inputs(cls, config, batch_shape, device, attention_mask, position_ids, cu_seq_lens, output_attentions):
        """Read the arguments of `forward`, all on `device`, about a batch of shape (B, L)."""
        batch_size, length = batch_shape
        if 0 in (batch_size, length):
            raise ValueError(
                f"The inputs have batch {batch_size} and length {length}, but both must be at least 1: leave out "
                "empty batches, and give every text at least its special tokens."
            )
        mask = read_attention_mask(attention_mask, batch_size, length, config.num_attention_heads)
        if position_ids is not None:
            position_ids = position_ids.view(-1, position_ids.shape[-1]).long()  # (L,) holds for all rows
            if position_ids.shape[0] not in (1, batch_size) or position_ids.shape[1:] != (length,):
                raise ValueError(
                    f"position_ids has shape {tuple(position_ids.shape)}, but the inputs have batch {batch_size} and "
                    f"length {length}: give ({batch_size}, {length}) or (1, {length})."
                )
        starts = sequence_starts(position_ids, cu_seq_lens, mask.tokens, batch_size, length, device)
        if starts is not None and not is_traced() and not packs_several(starts, mask.tokens):
            starts = None
        ranks = cls._ranks(mask.tokens, starts, length, device)
        return cls(
            config=config,
            mask=mask,
            ranks=ranks,
            position_ids=ranks if position_ids is None else position_ids,
            sequences=None if starts is None else starts.cumsum(1),
            attn_implementation="eager" if output_attentions else config._attn_implementation,
            batch_shape=(batch_size, length),
        )

    @staticmethod
    def _ranks(tokens, starts, length, device):
        order = torch.arange(length, device=device)[None]  # (1, L)
        before = order  # real tokens in front of each place
        if tokens is not None:
            if starts is not None or is_traced() or not bool((tokens[:, 1:] <= tokens[:, :-1]).all()):
                before = tokens.cumsum(1) - tokens.long()  # (B, L)
                order = before + tokens.long() - 1
            else:
                # Right padding, the usual case, keeps one row of positions for the whole batch: cheaper tables.
                order = order.clamp(max=tokens.sum(1).max() - 1)
        if starts is not None:
            order = order - torch.where(starts, before, 0).cummax(1).values  # counted from one's own sequence
        return order.clamp(min=0)

    def to(self, device, **options) -> "RectangularLayout":
        """A copy on another device: what accelerate asks of the inputs of layers that lie on several devices."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        moved = tree_map(lambda v: v.to(device, **options) if isinstance(v, torch.Tensor) else v, values)
        return replace(self, **moved)

    def check_length(self, positions: PositionScheme, given: bool) -> None:
        """Refuse positions past the end of a table, before they become an index error on some device."""
        rows, length = positions.num_table_rows, self.ranks.shape[1]
        if rows is None or (length <= rows and not given):
            return
        longest = length if is_traced() else int(self.position_ids.max()) + 1
        if longest > rows:
            raise ValueError(
                f"A sequence has {longest} positions, but position_embedding_type "
                f"{self.config.position_embedding_type!r} has a table of max_position_embeddings={rows} rows: "
                f"truncate the text (tokenizer(..., truncation=True, max_length={rows})), raise "
                "max_position_embeddings before training, or use 'rope', 'relative_bias' or 'alibi', which go on."
            )

    def counts_tokens(self) -> bool:
        """Whether every real token's position is its rank, as it is unless a caller numbers them otherwise."""
        same = self.position_ids == self.ranks
        return self.position_ids is self.ranks or bool(
            (same if self.mask.tokens is None else same | ~self.mask.tokens).all()
        )

    def prepare(self, positions: PositionScheme, like: torch.Tensor) -> dict[str, tuple[torch.Tensor | None, ...]]:
        """What every layer of a type adds to its scores, made once per batch: here one `(B|1, 1|H, L|1, L)` or None.

        Layers take the tensors one by one, since reentrant checkpointing loses the gradients of nested ones.

        Args:
            positions: The scheme, asked for its rotation and bias.
            like: The embeddings `(B, L, E)`, for dtype and device.
        """
        dtype = self.choose_dtype(like)
        bias = positions.score_bias(self.position_ids, self.position_ids)
        masks = {}
        for layer_type in sorted(set(self.config.layer_types)):
            self.rotations[layer_type] = positions.rotation(like, self.position_ids, layer_type)
            if self.attn_implementation in ("eager", "sdpa"):
                masks[layer_type] = (self._score_mask(layer_type, bias, dtype, like.device),)
            else:
                masks[layer_type] = (self._library_mask(layer_type, bias, like),)
        return masks

    def choose_dtype(self, like: torch.Tensor) -> torch.dtype:
        """Decide, once per batch, in which dtype the layers attend.

        On a CPU torch's kernel goes backward in half precision up to ten times as slowly as in fp32 (torch 2.13, texts
        of 40 tokens), so that training attends in fp32 there; projections and feed-forward stay in half precision.
        """
        self.attends_in = score_dtype(like)
        half = self.attends_in in (torch.bfloat16, torch.float16)
        trains_on_cpu = like.device.type == "cpu" and torch.is_grad_enabled() and not is_traced()
        if half and trains_on_cpu and self.attn_implementation == "sdpa":
            self.attends_in = torch.float32
        return self.attends_in

    def precision(self, projected: torch.Tensor) -> AbstractContextManager:
        """The context to attend in: where scores are to be fp32, autocast must not take them back."""
        if self.attends_in == torch.float32 and torch.is_autocast_enabled(projected.device.type):
            return torch.autocast(projected.device.type, enabled=False)
        return nullcontext()

    def _visible(self, layer_type: str) -> torch.Tensor | None:
        """Which query may see which key, `(B|1, 1|H, L|1, L)`; None: all see all. Axes of 1 stay unexpanded."""
        visible = self.mask.pairs
        if visible is None and self.mask.tokens is not None:
            visible = self.mask.tokens[:, None, None, :]
        rules = [visible]
        if self.sequences is not None:
            rules.append(self.sequences[:, None, :, None] == self.sequences[:, None, None, :])
        # Traced, the comparison would become a bound on the length.
        if layer_type == "sliding_attention" and (is_traced() or self.config.sliding_window < self.ranks.shape[1] - 1):
            query, key = self.ranks[:, None, :, None], self.ranks[:, None, None, :]
            rules.append(self._near(query, key))
        rules = [rule for rule in rules if rule is not None]
        visible = rules[0] if rules else None
        for rule in rules[1:]:
            visible = visible & rule
        return visible

    def _near(self, query, key):
        """Whether ranks lie within the window of each other, or one of them is global."""
        near = (query - key).abs() <= self.config.sliding_window
        if self.config.num_global_tokens:
            near = near | (query < self.config.num_global_tokens) | (key < self.config.num_global_tokens)
        return near

    def _score_mask(self, layer_type, bias, dtype, device):
        visible = self._visible(layer_type)
        if visible is None:
            return additive_mask(None, bias, dtype, device)
        # A query that may see nothing would be softmax over nothing: it sees all, and `attend` sets its output to 0.
        blind = ~visible.any(dim=-1, keepdim=True)  # (B|1, 1|H, L|1, 1)
        if is_traced() or bool(blind.any()):
            self.blind[layer_type] = blind
            visible = visible | blind
        if self.mask.scores is not None:
            bias = self.mask.scores if bias is None else bias + self.mask.scores
        return additive_mask(visible, bias, dtype, device)

    def _library_mask(self, layer_type, bias, like):
        """The mask of another back end (flash, flex, registered by name), made by transformers."""
        globals_used = self.config.num_global_tokens if layer_type == "sliding_attention" else 0
        for name, used in {
            f"position_embedding_type={self.config.position_embedding_type!r}": bias is not None,
            "an attention_mask with more than two axes": self.mask.pairs is not None,
            # Elsewhere flash computes them, see `VariableLengthLayout`.
            "packed rows in the padded layout (padding_free=False, all hidden states, fp32, a back end without "
            "variable lengths)": self.sequences is not None,
            f"num_global_tokens={globals_used}": globals_used,
        }.items():
            if used:
                raise ValueError(
                    f"{name} cannot be computed with attn_implementation={self.attn_implementation!r}; load the model "
                    "with attn_implementation='sdpa'."
                )
        sliding = layer_type == "sliding_attention"
        create = create_bidirectional_sliding_window_mask if sliding else create_bidirectional_mask
        return create(self.config, like, self.mask.tokens)

    def attend(self, attention_interface, module, query, key, value, masks):
        """Attention over `(B, L, heads, D)` queries, keys and values, by the given back end.

        Returns:
            Output `(B, L, E)`, and the weights `(B, H, L, L)` where the back end gives them.
        """
        sliding = module.layer_type == "sliding_attention"
        output, weights = attention_interface(
            module,
            query.transpose(1, 2),  # (B, H, L, D)
            key.transpose(1, 2),  # (B, K, L, D)
            value.transpose(1, 2),
            masks[0],
            dropout=module.attention_dropout if module.training else 0.0,
            scaling=module.scaling,
            # Flash kernels count the token itself: a radius of r is a window of r + 1 on each side.
            sliding_window=self.config.sliding_window + 1 if sliding else None,
        )  # output (B, L, H, D)
        blind = self.blind.get(module.layer_type)
        if blind is not None:
            output = output.masked_fill(blind.transpose(1, 2), 0.0)  # (B, L, H, D)
            weights = weights if weights is None else weights.masked_fill(blind, 0.0)
        return output.flatten(2), weights

    @property
    def packs(self) -> bool:
        """Whether rows hold several sequences, whose number the heads follow; traced shapes must not follow data."""
        return self.sequences is not None and not is_traced()

    def sequences_per_row(self) -> list[int]:
        """How many sequences with a real token each packed row holds; a row without any counts as one."""
        tokens = torch.ones_like(self.sequences, dtype=torch.bool) if self.mask.tokens is None else self.mask.tokens
        rows = zip(self.sequences, tokens, strict=True)
        return [max(len(numbers[real].unique()), 1) for numbers, real in rows]

    def gather(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Inputs `(B, L, ...)` in the arrangement that the layers compute in: here as they are."""
        return tensor

    def fill_padding(self, tensor: torch.Tensor, fill: float) -> torch.Tensor:
        """A tensor `(B, L, ...)` with `fill` on padding."""
        if self.mask.tokens is None:
            return tensor
        return tensor.masked_fill(~self.mask.tokens[(...,) + (None,) * (tensor.ndim - 2)], fill)

    def finish(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states in the layout's own arrangement, with rows of padding, where it has them, 0."""
        return self.fill_padding(hidden_states, 0.0)

    def restore(self, tensor: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """What was computed, laid out as the caller handed the batch in: `(B, L, ...)`, with `fill` on padding."""
        return self.fill_padding(tensor, fill)

    def select(self, tensor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What was computed for the real tokens `chosen` `(B, L)`, in the order of the batch: `(number, ...)`."""
        return tensor[chosen]

    def by_sequence(self, tensor: torch.Tensor, fill: float) -> torch.Tensor:
        """What was computed, one row a sequence in the order of the batch, with `fill` where there is no real token.

        Returns:
            `(B, L, ...)` as `restore`; of packed rows `(num_sequences, longest, ...)`, where a token's place is
            counted from the start of its own sequence.
        """
        if not self.packs:
            return self.restore(tensor, fill)
        flat = FlatLayout.from_rectangular(self)
        return flat.by_sequence(flat.gather(tensor), fill)

    def pool(self, hidden_states: torch.Tensor, pooling: str) -> torch.Tensor:
        """One vector per sequence in the order of the batch: its first real token, or mean or max over its real ones.

        The mean is summed in fp32, where half precision overflows; a row without a real token gives 0.

        Args:
            hidden_states: In the layout's arrangement, here `(B, L, E)`.
            pooling: "cls", "mean" or "max".

        Returns:
            `(B, E)`; of packed rows `(num_sequences, E)`. A packed sequence without a real token is padding and gives
            no vector, a row without any gives one.
        """
        if self.packs:
            flat = FlatLayout.from_rectangular(self)
            return flat.pool(flat.gather(hidden_states), pooling)
        tokens = self.mask.tokens
        if pooling == "cls":
            if tokens is None:
                return hidden_states[:, 0]
            first = tokens.int().argmax(dim=1)[:, None, None].expand(-1, 1, hidden_states.shape[-1])  # (B, 1, E)
            return hidden_states.gather(1, first).squeeze(1)
        if pooling == "mean":
            if tokens is None:
                return hidden_states.mean(dim=1, dtype=at_least_fp32(hidden_states.dtype)).to(hidden_states.dtype)
            total = self.fill_padding(hidden_states, 0.0).sum(dim=1, dtype=at_least_fp32(hidden_states.dtype))
            return (total / tokens.sum(dim=1, keepdim=True).clamp(min=1)).to(hidden_states.dtype)
        if tokens is None:
            return hidden_states.amax(dim=1)
        highest = self.fill_padding(hidden_states, torch.finfo(hidden_states.dtype).min).amax(dim=1)
        return highest.masked_fill(~tokens.any(dim=1, keepdim=True), 0.0)


@dataclass
class FlatLayout(RectangularLayout):
    """The real tokens of all sequences in one buffer `(T, ...)`, T = total real tokens: no work on padding.

    Sequences lie in the buffer in the order of their lengths, so that those of equal length are one contiguous block
    `(n, l, ...)` and one call of the attention back end.
    """

    indices: torch.Tensor | None = None  # (T,): place of each token in the batch laid end to end
    groups: tuple[tuple[int, int], ...] = ()  # (number of sequences, their length), as they lie in the buffer
    numbers: torch.Tensor | None = None  # (sequences,): as they lie in the buffer, their number in the batch
    num_sequences: int = 0  # with the rows that hold no real token

    @classmethod
    def from_rectangular(cls, layout: RectangularLayout) -> "FlatLayout":
        """Order the sequences of a padded or packed batch by length."""
        batch_size, length = layout.batch_shape
        tokens = layout.mask.tokens
        sequence = torch.arange(batch_size, device=layout.ranks.device)[:, None]  # (B, 1): the number of its sequence
        if layout.sequences is not None:
            sequence = sequence * (length + 1) + layout.sequences  # (B, L)
        sequence = sequence.expand(batch_size, length)
        sequence = sequence.flatten() if tokens is None else sequence[tokens]  # (T,)
        places = torch.arange(batch_size * length, device=sequence.device)
        places = places if tokens is None else places[tokens.flatten()]  # (T,)
        _, counts = sequence.unique_consecutive(return_counts=True)
        order = counts.repeat_interleave(counts).argsort(stable=True)  # stable: a sequence stays together, in order
        sorted_counts, by_length = counts.sort(stable=True)
        lengths, sizes = sorted_counts.unique_consecutive(return_counts=True)
        rows = places[counts.cumsum(0) - counts] // length  # the row of each sequence
        empty = (torch.bincount(rows, minlength=batch_size) == 0).cumsum(0)  # (B,): rows without one, so far
        numbers = torch.arange(len(rows), device=rows.device) + empty[rows]
        return cls(
            **{field.name: getattr(layout, field.name) for field in fields(layout)},
            indices=places[order],
            groups=tuple(zip(sizes.tolist(), lengths.tolist(), strict=True)),
            numbers=numbers[by_length],
            num_sequences=len(rows) + int(empty[-1]),
        )

    def gather(self, tensor):
        if tensor is None:
            return None
        return tensor.expand(*self.batch_shape, *tensor.shape[2:]).flatten(0, 1)[self.indices]  # (T, ...)

    def prepare(self, positions, like):
        flat_positions = self.gather(self.position_ids)  # (T,)
        self.choose_dtype(like)
        masks = {}
        for layer_type in sorted(set(self.config.layer_types)):
            self.rotations[layer_type] = positions.rotation(like, flat_positions, layer_type)
            blocked = [layer_type == "sliding_attention" and uses_blocks(self.config, l) for _, l in self.groups]
            longest = max(
                (l for (_, l), in_blocks in zip(self.groups, blocked, strict=True) if not in_blocks), default=0
            )
            dense = self._dense_mask(layer_type, positions, like, longest)
            masks[layer_type] = ()
            for (_, l), in_blocks in zip(self.groups, blocked, strict=True):
                if in_blocks:
                    masks[layer_type] += self._block_masks(positions, like, l)
                else:  # a shorter sequence takes its corner
                    masks[layer_type] += (None if dense is None else dense[..., :l, :l], None)
        return masks

    def _dense_mask(self, layer_type, positions, like, length):
        ranks = torch.arange(length, device=like.device)[None]
        bias = positions.score_bias(ranks, ranks)  # (1, H, l, l)
        near = None
        if layer_type == "sliding_attention" and self.config.sliding_window < length - 1:
            near = self._near(ranks[:, :, None], ranks[:, None, :])[:, None]  # (1, 1, l, l)
        return additive_mask(near, bias, self.attends_in, like.device)

    def _block_masks(self, positions, like, length):
        """Added to the scores of blocks of queries, `(blocks, 1|H, block, keys)`, keys = global + block + 2 radius."""
        block, radius, num_global = block_size(self.config), self.config.sliding_window, self.config.num_global_tokens
        first = torch.arange(0, length, block, device=like.device)[:, None]  # (blocks, 1)
        query = first + torch.arange(block, device=like.device)
        local = first + torch.arange(-radius, block + radius, device=like.device)
        key = torch.cat((torch.arange(num_global, device=like.device).expand(len(first), -1), local), dim=1)
        # Global keys stand in front of every block; seen again inside the window they would count twice.
        band = (query[0, :, None] - local[0]).abs() <= radius  # (block, block + 2 radius): the same in every block
        near = band & ((local >= num_global) & (local < length))[:, None, :]
        near = nn.functional.pad(near, (num_global, 0), value=True)
        blocks = additive_mask(near[:, None], positions.score_bias(query, key), self.attends_in, like.device)
        # Global queries see everything, in a call of their own: (1, H, G, l) or None.
        ranks = torch.arange(length, device=like.device)[None]
        return blocks, additive_mask(
            None, positions.score_bias(ranks[:, :num_global], ranks), blocks.dtype, like.device
        )

    def attend(self, attention_interface, module, query, key, value, masks):
        """Attention over `(T, heads, D)`, one call of the back end for each group of equally long sequences."""
        # One split for all groups: the gradient of a slice is as large as the whole buffer, once for every group.
        sizes = [number * length for number, length in self.groups]
        parts = zip(*(tensor.split(sizes) for tensor in (query, key, value)), strict=True)
        outputs = []
        for (number, length), part, mask, global_bias in zip(self.groups, parts, masks[::2], masks[1::2], strict=True):
            query_key_value = [tensor.unflatten(0, (number, length)).transpose(1, 2) for tensor in part]
            if module.layer_type == "sliding_attention" and uses_blocks(self.config, length):
                output = self._attend_blocks(attention_interface, module, *query_key_value, mask, global_bias)
            else:
                output = self._attend_group(attention_interface, module, *query_key_value, mask)
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs).flatten(1), None  # (T, E)

    @staticmethod
    def _attend_group(attention_interface, module, query, key, value, mask):
        dropout = module.attention_dropout if module.training else 0.0
        output, _ = attention_interface(module, query, key, value, mask, dropout=dropout, scaling=module.scaling)
        return output  # (n, l, H, D)

    def _attend_blocks(self, attention_interface, module, query, key, value, mask, global_bias):
        """Local attention at the cost of its window: a block of queries meets its own keys and a radius each side."""
        block, radius, num_global = block_size(self.config), self.config.sliding_window, self.config.num_global_tokens
        length = query.shape[2]
        num_blocks = -(-length // block)
        missing = num_blocks * block - length

        def windows(tensor):
            padded = nn.functional.pad(tensor, (0, 0, radius, radius + missing))  # (K, blocks * block + 2 radius, D)
            local = padded.unfold(1, block + 2 * radius, block).permute(1, 0, 3, 2)  # a view: (blocks, K, keys, D)
            if not num_global:
                return local
            return torch.cat((tensor[:, :num_global].expand(num_blocks, -1, -1, -1), local), dim=2)

        outputs = []
        for query_of, key_of, value_of in zip(query, key, value, strict=True):  # one sequence: (heads, l, D)
            blocks = nn.functional.pad(query_of, (0, 0, 0, missing)).unflatten(1, (num_blocks, block)).transpose(0, 1)
            output = self._attend_group(attention_interface, module, blocks, windows(key_of), windows(value_of), mask)
            outputs.append(output.flatten(0, 1)[:length])  # (l, H, D)
        output = torch.stack(outputs)
        if num_global:
            seen = self._attend_group(attention_interface, module, query[:, :, :num_global], key, value, global_bias)
            output = torch.cat((seen, output[:, num_global:]), dim=1)
        return output

    def finish(self, hidden_states):
        return hidden_states  # (T, E): there is no padding

    def restore(self, tensor, fill=0.0):
        batch_size, length = self.batch_shape
        rows = tensor.new_full((batch_size * length, *tensor.shape[1:]), fill)
        return rows.index_copy(0, self.indices, tensor).unflatten(0, (batch_size, length))

    def select(self, tensor, chosen):
        found = chosen.flatten()[self.indices].nonzero().flatten()  # places in the buffer
        return tensor[found[self.indices[found].argsort()]]

    def by_sequence(self, tensor, fill):
        if not self.packs:
            return self.restore(tensor, fill)
        places = torch.arange(self.batch_shape[1], device=self.indices.device).expand(self.batch_shape)
        begins = self.sequences.diff(dim=1, prepend=self.sequences[:, :1]) > 0  # (B, L)
        places = self.gather(places - places.masked_fill(~begins, 0).cummax(1).values)  # (T,)
        lengths = torch.tensor([length for number, length in self.groups for _ in range(number)])
        numbers = self.numbers.repeat_interleave(lengths.to(self.numbers.device))  # (T,)
        longest = int(places.max()) + 1
        rows = tensor.new_full((self.num_sequences * longest, *tensor.shape[1:]), fill)
        return rows.index_copy(0, numbers * longest + places, tensor).unflatten(0, (self.num_sequences, longest))

    def pool(self, hidden_states, pooling):
        pooled = []
        # Split once: slices would each bring a gradient of the whole buffer.
        blocks = hidden_states.split([number * length for number, length in self.groups])
        for block, group in zip(blocks, self.groups, strict=True):
            block = block.unflatten(0, group)  # (n, l, E)
            if pooling == "cls":
                pooled.append(block[:, 0])
            elif pooling == "mean":
                pooled.append(block.mean(dim=1, dtype=at_least_fp32(block.dtype)).to(block.dtype))
            else:
                pooled.append(block.amax(dim=1))
        rows = hidden_states.new_zeros(self.num_sequences, hidden_states.shape[-1])
        return rows.index_copy(0, self.numbers, torch.cat(pooled))


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(D) + mask) V, with all weights in memory; arXiv:1706.03762, eq. 1.

    Args:
        module: The attention module, for its number of query heads per key head and its training mode.
        query: `(B, H, L, D)`.
        key: `(B, K, L, D)`, like `value`.
        attention_mask: Added to the scores, `(B|1, 1|H, L|1, L)`, or None.
        scaling: 1 / sqrt(D): a dot product of D unit-variance terms has variance D, and a saturated softmax learns
            nothing.
        dropout: Rate on the weights.

    Returns:
        Output `(B, L, H, D)`, and the weights `(B, H, L, L)` before dropout, whose rows sum to 1.
    """
    if module.num_key_value_groups > 1:
        key = key.repeat_interleave(module.num_key_value_groups, dim=1)  # (B, H, L, D)
        value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = (query * scaling) @ key.transpose(2, 3)  # (B, H, L, L)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=at_least_fp32(scores.dtype)).to(query.dtype)
    output = nn.functional.dropout(weights, p=dropout, training=module.training) @ value  # (B, H, L, D)
    return output.transpose(1, 2), weights


__all__ = [
    "FlatLayout",
    "RectangularLayout",
    "at_least_fp32",
    "eager_attention_forward",
    "read_attention_mask",
]
