"""What the encoders with rotary positions have in common, for the modules that describe each of them.

The stock classes are the rule: what they ignore in their configuration is not taken over.
"""

import copy
from typing import Any

from transformers import PreTrainedConfig

from .configuration_dsx_encoder import DsxEncoderConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
# Fields of the same name and sense on both sides.
SAME_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "initializer_range", "tie_word_embeddings",
)  # fmt: skip
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")

PROJECTIONS = {
    "layers.{}.self_attn.q_proj": "layers.{}.attention.qkv_proj[0]",
    "layers.{}.self_attn.k_proj": "layers.{}.attention.qkv_proj[1]",
    "layers.{}.self_attn.v_proj": "layers.{}.attention.qkv_proj[2]",
    "layers.{}.self_attn.o_proj": "layers.{}.attention.out_proj",
    "layers.{}.mlp.gate_proj": "layers.{}.mlp.gate_proj",
    "layers.{}.mlp.up_proj": "layers.{}.mlp.up_proj",
    "layers.{}.mlp.down_proj": "layers.{}.mlp.down_proj",
}


def shared_to_dsx(stock: PreTrainedConfig, **fields: Any) -> dict[str, Any]:
    """What all four families say alike, and `fields`, as fields of `DsxEncoderConfig`.

    Raises:
        ValueError: Heads that are not hidden_size / num_attention_heads wide.
    """
    head_dim, equal_share = getattr(stock, "head_dim", None), stock.hidden_size // stock.num_attention_heads
    if head_dim is not None and head_dim != equal_share:
        raise ValueError(
            f"head_dim ({head_dim}) differs from hidden_size / num_attention_heads = {stock.hidden_size} / "
            f"{stock.num_attention_heads} = {equal_share}, but a DSX encoder gives every head that equal share: "
            "such a checkpoint has no DSX form."
        )
    shared = {name: getattr(stock, name) for name in SAME_FIELDS}
    for name in TOKEN_IDS:
        number = getattr(stock, name, None)
        shared[name] = number[0] if isinstance(number, list) else number  # some configurations name several ends
    rope = copy.deepcopy(stock.rope_parameters)
    for parameters in [rope[key] for key in LAYER_TYPES if key in rope] or [rope]:
        if parameters.get("rope_type", "default") == "default":
            parameters.pop("partial_rotary_factor", None)  # the stock classes turn whole heads all the same
    return shared | {"position_embedding_type": "rope", "rope_parameters": rope, "mlp_dropout": 0.0} | fields


def shared_from_dsx(config: DsxEncoderConfig, **fields: Any) -> dict[str, Any]:
    """What all four families say alike, and `fields`, as arguments of a stock configuration."""
    shared = {name: getattr(config, name) for name in (*SAME_FIELDS, *TOKEN_IDS[:3])}
    shared |= {name: getattr(config, name) for name in TOKEN_IDS[3:] if getattr(config, name) is not None}
    return shared | fields


def rope_of(config: DsxEncoderConfig) -> dict[str, dict] | None:
    """RoPE parameters for each layer type; None where the positions are no rotations."""
    if config.position_embedding_type != "rope":
        return None
    nested = config.nested_rope_parameter_keys(config.rope_parameters)
    first = config.rope_parameters[nested[0]] if nested else config.rope_parameters
    return {key: copy.deepcopy(config.rope_parameters.get(key) or first) for key in LAYER_TYPES}


def one_rope_of(config: DsxEncoderConfig) -> dict | None:
    """The RoPE parameters of the first layer, for families that turn all layers alike."""
    rope = rope_of(config)
    return rope and rope[config.layer_types[0]]


def pooling_of(config: DsxEncoderConfig, known: dict[str, str]) -> str:
    """The family's word for the pooling, its first one where it has none."""
    return known.get(config.classifier_pooling, next(iter(known.values())))


__all__ = ["PROJECTIONS", "one_rope_of", "pooling_of", "rope_of", "shared_from_dsx", "shared_to_dsx"]
