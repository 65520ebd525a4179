"""Which layout a batch of the DSX encoder gets, and the layout of variable-length kernels.

- `VariableLengthLayout`: the real tokens of all sequences in one call of a kernel that is told where each one ends.
- `kernel_serves`: whether there is such a kernel for a model on a machine.
- `layout_class`: the rules, on plain values; `choose_layout` reads a batch and follows them.

Shapes: B batch, L sequence, T real tokens of the whole batch, E hidden_size, H heads, K key-value heads, D = E/H head
size.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_dsx_encoder import FlatLayout, RectangularLayout, score_dtype, uses_blocks
from .configuration_dsx_encoder import DsxEncoderConfig
from .positions_dsx_encoder import POSITION_SCHEMES, PositionScheme, is_traced

# From this length on, a mask of L x L is dearer on an accelerator than a call for each length of a sequence.
LONG = 1024


@cache
def variable_length_attention() -> Callable | None:
    """`varlen_attn` of torch; None where torch has none, or an early one (2.10) without window, scale and groups."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return (
        varlen_attn
        if {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)
        else None
    )


@dataclass
class VariableLengthLayout(FlatLayout):
    """The buffer of `FlatLayout`, and the edges of its sequences: one call of a kernel for all of them.

    No mask is made: the kernel skips what lies outside a token's own sequence and window.
    """

    cu_seq_lens: torch.Tensor | None = None  # (sequences + 1,), int32: where each begins in the buffer, and the end
    max_length: int = 0

    @classmethod
    def from_rectangular(cls, layout):
        flat = super().from_rectangular(layout)
        lengths = [length for number, length in flat.groups for _ in range(number)]
        edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=flat.indices.device)
        return replace(flat, cu_seq_lens=edges, max_length=max(lengths))

    def prepare(self, positions, like):
        flat_positions = self.gather(self.position_ids)  # (T,)
        for layer_type in sorted(set(self.config.layer_types)):
            self.rotations[layer_type] = positions.rotation(like, flat_positions, layer_type)
        return dict.fromkeys(self.config.layer_types, ())

    def attend(self, attention_interface, module, query, key, value, masks):
        """Attention over `(T, heads, D)`, by transformers' flash interface or torch's own kernel."""
        radius = self.config.sliding_window if module.layer_type == "sliding_attention" else None
        # Under autocast rotated queries and keys are fp32, and neither interface casts all three for itself.
        query_key_value = [tensor.to(score_dtype(tensor)) for tensor in (query, key, value)]
        if attention_interface is flash_attention_forward:
            output, _ = attention_interface(
                module,
                *(tensor[None].transpose(1, 2) for tensor in query_key_value),  # (1, heads, T, D)
                None,
                dropout=module.attention_dropout if module.training else 0.0,
                scaling=module.scaling,
                # Counts the token itself, as in the padded batch.
                sliding_window=None if radius is None else radius + 1,
                cu_seq_lens_q=self.cu_seq_lens,
                cu_seq_lens_k=self.cu_seq_lens,
                max_length_q=self.max_length,
                max_length_k=self.max_length,
            )  # (1, T, H, D)
            return output[0].flatten(1), None  # (T, E)
        output = variable_length_attention()(
            *query_key_value,
            self.cu_seq_lens,
            self.cu_seq_lens,
            self.max_length,
            self.max_length,
            scale=module.scaling,
            # Inclusive on both sides, as our radius is.
            window_size=(-1, -1) if radius is None else (radius, radius),
            enable_gqa=module.num_key_value_groups > 1,
        )  # (T, H, D)
        return output.flatten(1), None


class Machine(NamedTuple):
    """What attention will be computed on, and in.

    `capability` is that of a CUDA device on which torch's flash kernels may be used, and (0, 0) for everything else.
    """

    device_type: str
    dtype: torch.dtype
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, like: torch.Tensor, dtype: torch.dtype) -> "Machine":
        """The machine that `like` lies on, for a model of the given dtype."""
        capability = (0, 0)
        if like.device.type == "cuda" and torch.version.hip is None:
            # `sdpa_kernel` and the like may have turned flash kernels off: torch's own dispatch would obey as well.
            if torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled():
                capability = torch.cuda.get_device_capability(like.device)
        return cls(like.device.type, score_dtype(like, dtype), capability)


def torch_kernel_serves(config: DsxEncoderConfig, machine: Machine, attention_dropout: float) -> bool:
    """Whether `varlen_attn` computes this: Ampere or newer, heads of 8, 16, ... 256 features, and no dropout.

    The backward of heads above 192 features needs the large shared memory of data-centre GPUs (8.0, 9.0).
    """
    head_size = config.hidden_size // config.num_attention_heads
    widest = 256 if machine.capability in ((8, 0), (9, 0)) else 192
    return (
        variable_length_attention() is not None
        and machine.device_type == "cuda"
        and machine.capability >= (8, 0)
        and head_size % 8 == 0
        and head_size <= widest
        and attention_dropout == 0
    )


def kernel_serves(
    config: DsxEncoderConfig, machine: Machine, attn_implementation: str, attention_dropout: float = 0.0
) -> bool:
    """Whether one call of a variable-length kernel computes every layer's attention.

    That needs half precision, no bias on the scores (T5, ALiBi) and no global tokens beside a window. The back end is
    told by the function behind its name: kernels of the Hub come under many names, and a function of the user's own
    may not read the edges of the sequences.
    """
    if machine.device_type == "cpu" or machine.dtype not in (torch.float16, torch.bfloat16):
        return False
    biased = POSITION_SCHEMES[config.position_embedding_type].score_bias is not PositionScheme.score_bias
    if biased or ("sliding_attention" in config.layer_types and config.num_global_tokens):
        return False
    function = ALL_ATTENTION_FUNCTIONS.get(attn_implementation)
    if function is sdpa_attention_forward:
        return torch_kernel_serves(config, machine, attention_dropout)
    return function is flash_attention_forward


def layout_class(
    layout: RectangularLayout, machine: Machine, attention_dropout: float = 0.0
) -> type[RectangularLayout]:
    """The rules of the choice, for a batch that may be flattened.

    | where | variable-length | flat | padded |
    |---|---|---|---|
    | a kernel serves | padding, packed rows or windows | | else |
    | CPU, eager or SDPA | | padding, packed rows or blocks | else |
    | elsewhere, eager or SDPA | | packed rows or blocks, from `LONG` on | else |
    | other back ends | | | all |
    """
    config, length = layout.config, layout.batch_shape[1]
    sliding = "sliding_attention" in config.layer_types
    packed, padded = layout.sequences is not None, layout.mask.tokens is not None
    if kernel_serves(config, machine, layout.attn_implementation, attention_dropout):
        windowed = sliding and config.sliding_window < length - 1
        return VariableLengthLayout if padded or packed or windowed else RectangularLayout
    # Masks of flat layouts count tokens; kernels need no mask.
    if layout.attn_implementation not in ("eager", "sdpa") or not layout.counts_tokens():
        return RectangularLayout
    blocked = sliding and uses_blocks(config, length)
    if machine.device_type == "cpu":
        return FlatLayout if padded or packed or blocked else RectangularLayout
    return FlatLayout if length >= LONG and (packed or blocked) else RectangularLayout


def choose_layout(
    config: DsxEncoderConfig,
    like: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
    output_attentions: bool = False,
    output_hidden_states: bool = False,
    dtype: torch.dtype = torch.float32,
    attention_dropout: float = 0.0,
) -> RectangularLayout:
    """The layout of a batch: on its real tokens alone where that pays, see `layout_class`.

    The rectangle stays when weights or all hidden states are wanted, when a mask says more than which tokens are
    real, and under tracing, compilation and export, where shapes must not follow the data.

    Args:
        config: Its `padding_free` turns flat layouts off.
        like: A tensor `(B, L, ...)` on the device of the model.
        attention_mask: As `DsxEncoderModel.forward`, like the next two.
        position_ids: See there.
        cu_seq_lens: See there.
        output_attentions: Whether weights are wanted.
        output_hidden_states: Whether all hidden states are wanted.
        dtype: Of the model.
        attention_dropout: Rate that will be used; 0 in evaluation.
    """
    inputs = (attention_mask, position_ids, cu_seq_lens)
    may_flatten = (
        config.padding_free
        and not (output_attentions or output_hidden_states or is_traced())
        and like.device.type != "meta"
        and getattr(attention_mask, "ndim", 2) == 2
    )
    device = like.device
    if may_flatten:
        # Every look at a value waits for an accelerator: one copy of the inputs, and the rest is worked out here.
        device = torch.device("cpu")
        inputs = [tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor for tensor in inputs]
    layout = RectangularLayout.from_inputs(config, like.shape[:2], device, *inputs, output_attentions)
    tokens = layout.mask.tokens
    if may_flatten and (tokens is None or bool(tokens.any())):
        kind = layout_class(layout, Machine.of(like, dtype), attention_dropout)
        layout = kind.from_rectangular(layout) if issubclass(kind, FlatLayout) else layout
    return layout if device == like.device else layout.to(like.device)


__all__ = [
    "Machine",
    "VariableLengthLayout",
    "choose_layout",
    "kernel_serves",
    "layout_class",
]
