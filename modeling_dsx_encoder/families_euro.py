"""EuroBERT and UltraBERT in their DSX form: pre-norm with RMSNorm, grouped heads, rotary positions.

Each family is two key maps (trunk, heads) and two functions between the configurations; see `families.py`.
"""

from typing import Any

from transformers import PreTrainedConfig

from .configuration_dsx_encoder import DsxEncoderConfig
from .families import Family, Head
from .families_rotary import PROJECTIONS, one_rope_of, pooling_of, rope_of, shared_from_dsx, shared_to_dsx

EURO_TRUNK = {
    "embed_tokens": "embeddings.word_embeddings",
    **PROJECTIONS,
    "layers.{}.input_layernorm": "layers.{}.attention_norm",
    "layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
    "norm": "final_norm",
}
EURO_HEADS = {
    "": Head("EuroBertModel", {}),
    "MaskedLM": Head("EuroBertForMaskedLM", {"lm_head": "decoder"}),
    "SequenceClassification": Head(
        "EuroBertForSequenceClassification", {"dense": "pooler.dense", "classifier": "classifier"}
    ),
    "TokenClassification": Head("EuroBertForTokenClassification", {"classifier": "classifier"}),
}
ULTRA_HEADS = {
    "": Head("UltrabertModel", {}),
    "MaskedLM": Head(
        "UltrabertForMaskedLM",
        {
            "head.linear1": "prediction_head.dense",
            "head.linear2": "prediction_head.out_proj",
            "head.decoder": "decoder",
        },
    ),
    "SequenceClassification": Head("UltrabertForSequenceClassification", {"classifier": "classifier"}),
    "TokenClassification": Head("UltrabertForTokenClassification", {"classifier": "classifier"}),
    "QuestionAnswering": Head("UltrabertForQuestionAnswering", {"qa_outputs": "qa_outputs"}),
}
EURO_POOLINGS = {"late": "late", "cls": "bos", "mean": "mean"}


def llama_like_to_dsx(stock: PreTrainedConfig, **fields: Any) -> dict[str, Any]:
    """What EuroBERT and UltraBERT share: pre-norm with RMSNorm, gated, grouped heads, one rate of dropout."""
    return shared_to_dsx(
        stock,
        num_key_value_heads=stock.num_key_value_heads,
        hidden_act=stock.hidden_act,
        mlp_bias=stock.mlp_bias,
        attention_bias=stock.attention_bias,
        norm_type="rms_norm",
        norm_eps=stock.rms_norm_eps,
        embedding_dropout=0.0,
        attention_dropout=stock.attention_dropout,
        hidden_dropout=0.0,
        **fields,
    )


def llama_like_from_dsx(config: DsxEncoderConfig, **fields: Any) -> dict[str, Any]:
    """The way back of `llama_like_to_dsx`."""
    return shared_from_dsx(
        config,
        num_key_value_heads=config.num_key_value_heads,
        hidden_act=config.hidden_act,
        mlp_bias=config.mlp_bias,
        attention_bias=config.attention_bias,
        rms_norm_eps=config.norm_eps,
        attention_dropout=config.attention_dropout,
        **fields,
    )


def euro_to_dsx(stock: PreTrainedConfig) -> dict[str, Any]:
    """EuroBERT (https://arxiv.org/abs/2503.05500): the masked-LM head is a linear alone, "bos" is our "cls"."""
    pooling = {theirs: ours for ours, theirs in EURO_POOLINGS.items()}.get(stock.classifier_pooling)
    if pooling is None:
        raise ValueError(
            f"classifier_pooling ({stock.classifier_pooling!r}) of EuroBERT must be one of "
            f"{sorted(EURO_POOLINGS.values())}; write one of these into its configuration."
        )
    return llama_like_to_dsx(
        stock,
        classifier_pooling=pooling,
        classifier_activation="gelu",
        prediction_head="none",
        decoder_bias=stock.mlp_bias,
    )


def euro_from_dsx(config: DsxEncoderConfig) -> dict[str, Any]:
    """Arguments of `EuroBertConfig`."""
    ids = {} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}
    return llama_like_from_dsx(
        config, rope_parameters=one_rope_of(config), classifier_pooling=pooling_of(config, EURO_POOLINGS), **ids
    )


def ultra_to_dsx(stock: PreTrainedConfig) -> dict[str, Any]:
    """UltraBERT: EuroBERT with windows, a head of two linears for masked LM, and classifiers on the bare vector."""
    return llama_like_to_dsx(
        stock,
        layer_types=list(stock.layer_types),
        sliding_window=stock.sliding_window,
        classifier_dropout=stock.classifier_dropout,
        classifier_pooling=stock.classifier_pooling,
        classifier_activation=None,
        prediction_head="mlp",
        prediction_head_size=stock.prediction_head_size,
        prediction_activation="gelu_pytorch_tanh",
        decoder_bias=False,
    )


def ultra_from_dsx(config: DsxEncoderConfig) -> dict[str, Any]:
    """Arguments of `UltrabertConfig`."""
    rate = config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout
    sizes = {"sliding_window": config.sliding_window, "prediction_head_size": config.prediction_head_size}
    return llama_like_from_dsx(
        config,
        layer_types=list(config.layer_types),
        rope_parameters=rope_of(config),
        classifier_dropout=float(rate),
        classifier_pooling=pooling_of(config, {"cls": "cls", "mean": "mean"}),
        **{name: size for name, size in sizes.items() if size is not None},
    )


FAMILIES = (
    Family("eurobert", "model", EURO_TRUNK, EURO_HEADS, euro_to_dsx, euro_from_dsx),
    Family("ultrabert", "model", EURO_TRUNK, ULTRA_HEADS, ultra_to_dsx, ultra_from_dsx),
)

__all__ = ["FAMILIES"]
