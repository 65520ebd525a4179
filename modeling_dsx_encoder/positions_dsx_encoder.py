"""Where a token stands: the seven position schemes of the DSX encoder, behind one face.

`PositionScheme` and its kinds say what a position adds to the embeddings, how it rotates queries and keys, and what
bias it gives to the scores. Layouts and layers do not know which one they serve.

Shapes: B batch, L sequence, E hidden_size, H heads, D = E/H head size.
"""

import math

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_dsx_encoder import DsxEncoderConfig


def is_traced() -> bool:
    """Whether shapes and values are being recorded, so that no branch may depend on the values of a tensor."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def sinusoidal_table(num_positions: int, hidden_size: int) -> torch.Tensor:
    """PE[p, 2i] = sin(p / 10000^(2i/E)), PE[p, 2i+1] = cos(same), in fp32; section 3.5 of arXiv:1706.03762.

    Returns:
        `(num_positions, hidden_size)`; an odd E ends with a sine.
    """
    position = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None]
    even = torch.arange(0, hidden_size, 2, dtype=torch.float64, device="cpu")
    angle = position / 10000.0 ** (even / hidden_size)  # (num_positions, ceil(E / 2))
    table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)  # (num_positions, E or E + 1)
    return table[:, :hidden_size].float()


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """The geometric slopes 2^(-8h/H), h = 1..H, of arXiv:2108.12409; for other H than powers of two, its filling rule.

    Returns:
        `(num_heads,)` in fp32.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * h / power) for h in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def relative_position_bucket(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """T5's bidirectional buckets (arXiv:1910.10683): exact when near, logarithmic when far, one half per direction.

    Args:
        distance: Key position minus query position, integers of any shape.
        num_buckets: Even.
        max_distance: From here on all share the last bucket.

    Returns:
        Integers in [0, num_buckets) of the same shape.
    """
    half = num_buckets // 2
    exact = half // 2
    away = distance.abs()
    # clamp: log(0) is never taken, and the exact branch covers those entries anyway.
    ratio = torch.log(away.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(away < exact, away, far) + (distance > 0) * half


class PositionScheme(nn.Module):
    """Gives tokens no position; the others override what they need of its three methods.

    Tables are fp32 buffers that are not saved. `_apply` keeps them fp32 when the model is cast, since a bfloat16
    `inv_freq` turns a long text's rotations into noise; `tables` gives their exact values, from which they are filled
    again after a model was built on the meta device. A scheme owns parameters or buffers, never both: transformers
    would take a module with both for loaded and leave the buffers unfilled.
    """

    def __init__(self, config: DsxEncoderConfig):
        super().__init__()
        self.config = config
        for name, table in self.tables().items():
            self.register_buffer(name, table, persistent=False)

    def tables(self) -> dict[str, torch.Tensor]:
        """Name and exact value of every buffer."""
        return {}

    def _apply(self, fn, recurse=True):
        def keep_fp32(tensor):
            moved = fn(tensor)
            if not any(tensor is table for table in self._buffers.values()):
                return moved
            return moved.float() if tensor.is_meta else tensor.to(moved.device)

        return super()._apply(keep_fp32, recurse)

    def add_to_embeddings(self, embeddings: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings `(..., E)` plus what position `(...)` adds to them."""
        return embeddings

    def rotation(
        self, like: torch.Tensor, position_ids: torch.Tensor, layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosines and sines `(..., 1, rotary size)` for `rotate`, or None."""
        return None

    def score_bias(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor | None:
        """What is added to the scores of queries `(B, Lq)` against keys `(B, Lk)`: `(B, H, Lq, Lk)`, or None."""
        return None

    @property
    def num_table_rows(self) -> int | None:
        """How many positions the scheme can tell apart; None: any number."""
        return None


class TablePositions(PositionScheme):
    """One row per position, added to the embedding; `position_offset` rows are left out in front."""

    @property
    def num_table_rows(self) -> int:
        return self.config.max_position_embeddings

    def add_to_embeddings(self, embeddings, position_ids):
        rows = nn.functional.embedding(position_ids + self.config.position_offset, self.table_weight)
        return embeddings + rows.to(embeddings.dtype)


class SinusoidalPositions(TablePositions):
    """Fixed sines and cosines, https://arxiv.org/abs/1706.03762."""

    def tables(self):
        num_rows = self.config.max_position_embeddings + self.config.position_offset
        return {"table": sinusoidal_table(num_rows, self.config.embedding_size)}

    @property
    def table_weight(self):
        return self.table


class LearnedPositions(TablePositions):
    """A trained row per position, as in BERT."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__(config)
        self.table = nn.Embedding(config.max_position_embeddings + config.position_offset, config.embedding_size)

    @property
    def table_weight(self):
        return self.table.weight


class DsxEncoderRotaryEmbedding(PositionScheme):
    """Cosines and sines of RoPE for every `rope_type` of transformers, one set or one set per layer type.

    The frequencies are a function of the configuration and, for "dynamic" and "longrope", of the longest position in
    the batch: a long batch leaves nothing behind that would change the next short one.
    """

    def __init__(self, config: DsxEncoderConfig):
        # Names of the buffers follow transformers: `inv_freq`, or `full_attention_inv_freq` and so on.
        nested = config.nested_rope_parameter_keys(config.rope_parameters)
        self.prefixes = {layer_type: f"{layer_type}_" for layer_type in sorted(nested)} or {None: ""}
        super().__init__(config)
        self.scalings = {layer_type: self.frequencies(layer_type)[1] for layer_type in self.prefixes}

    def tables(self):
        return {f"{prefix}inv_freq": self.frequencies(layer_type)[0] for layer_type, prefix in self.prefixes.items()}

    def parameters_of(self, layer_type: str | None) -> dict:
        """The RoPE parameters that hold for `layer_type`."""
        return self.config.rope_parameters[layer_type] if layer_type else self.config.rope_parameters

    def frequencies(self, layer_type: str | None, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
        """Inverse frequencies `(rotary size / 2,)` in fp32, and the factor on cosines and sines."""
        rope_type = self.parameters_of(layer_type)["rope_type"]
        init = self.compute_default_rope_parameters if rope_type == "default" else ROPE_INIT_FUNCTIONS[rope_type]
        # transformers makes some of them on the default device, and that is "meta" while a checkpoint is loaded.
        with torch.device("cpu"):
            inv_freq, scaling = init(self.config, torch.device("cpu"), seq_len=seq_len, layer_type=layer_type)
        return inv_freq.float(), scaling

    @staticmethod
    def compute_default_rope_parameters(config, device=None, seq_len=None, layer_type=None):
        """theta_i = base^(-2i/d), section 3.2.2 of arXiv:2104.09864; d may be a part of the head size."""
        parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        size = int(config.hidden_size // config.num_attention_heads * parameters.get("partial_rotary_factor", 1.0))
        even = torch.arange(0, size, 2, dtype=torch.float32, device=device)
        return 1.0 / parameters["rope_theta"] ** (even / size), 1.0

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None):
        """Cosines and sines `(..., rotary size)` of positions `(...)`, in the dtype of `x`; computed in fp32."""
        layer_type = layer_type if layer_type in self.prefixes else None
        inv_freq, scaling = getattr(self, f"{self.prefixes[layer_type]}inv_freq"), self.scalings[layer_type]
        if self.parameters_of(layer_type)["rope_type"] in ("dynamic", "longrope") and not is_traced():
            inv_freq, scaling = self.frequencies(layer_type, seq_len=int(position_ids.max()) + 1)
        angle = position_ids[..., None].float() * inv_freq.to(position_ids.device)  # (..., rotary size / 2)
        angle = torch.cat((angle, angle), dim=-1)
        return (angle.cos() * scaling).to(x.dtype), (angle.sin() * scaling).to(x.dtype)


class RotaryPositions(PositionScheme):
    """RoPE, https://arxiv.org/abs/2104.09864: q and k are turned by an angle that grows with the position."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__(config)
        self.rotary_emb = DsxEncoderRotaryEmbedding(config)

    def rotation(self, like, position_ids, layer_type):
        cos, sin = self.rotary_emb(like, position_ids, layer_type)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)  # (..., 1, rotary size): the same for every head


class RelativeBiasPositions(PositionScheme):
    """T5's learned bias per bucket of distance and head, shared by all layers; https://arxiv.org/abs/1910.10683."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__(config)
        self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_attention_heads)

    def score_bias(self, query_positions, key_positions):
        distance = key_positions[:, None, :] - query_positions[:, :, None]  # (B, Lq, Lk)
        buckets = relative_position_bucket(
            distance, self.config.relative_attention_num_buckets, self.config.relative_attention_max_distance
        )
        return self.relative_attention_bias(buckets).permute(0, 3, 1, 2)  # (B, H, Lq, Lk)


class LearnedRelativePositions(LearnedPositions, RelativeBiasPositions):
    """A trained row per position and T5's bias besides, as in MPNet; https://arxiv.org/abs/2004.09297."""


class AlibiPositions(PositionScheme):
    """-slope * |i - j|, the form for encoders of ALiBi, https://arxiv.org/abs/2108.12409."""

    def tables(self):
        return {"slopes": alibi_slopes(self.config.num_attention_heads)}

    def score_bias(self, query_positions, key_positions):
        distance = (key_positions[:, None, :] - query_positions[:, :, None]).abs()  # (B, Lq, Lk)
        return -self.slopes[:, None, None] * distance[:, None]  # (B, H, Lq, Lk)


POSITION_SCHEMES = {
    "sinusoidal": SinusoidalPositions,
    "learned": LearnedPositions,
    "rope": RotaryPositions,
    "relative_bias": RelativeBiasPositions,
    "learned_relative_bias": LearnedRelativePositions,
    "alibi": AlibiPositions,
    "none": PositionScheme,
}


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the first `rotary size` features of every head by their angles: x cos + (-x2, x1) sin.

    Args:
        x: Queries or keys `(..., heads, D)`.
        rotation: What `PositionScheme.rotation` gave for the same leading axes.
    """
    cos, sin = rotation
    size = cos.shape[-1]
    # Where all features turn, no slice: its gradient would be a copy.
    turned, rest = (x, None) if size == x.shape[-1] else x.split([size, x.shape[-1] - size], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = torch.addcmul(turned * cos, torch.cat((-second, first), dim=-1), sin)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


__all__ = [
    "POSITION_SCHEMES",
    "PositionScheme",
    "alibi_slopes",
    "is_traced",
    "relative_position_bucket",
    "rotate",
    "sinusoidal_table",
]
