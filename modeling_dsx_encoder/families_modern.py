"""NomicBERT and ModernBERT (Ettin, mmBERT) in their DSX form; with `families_euro`, all that have rotary positions.

Each family is two key maps (trunk, heads) and two functions between the configurations; see `families.py`.
"""

from typing import Any

from transformers import PreTrainedConfig

from . import families_euro
from .configuration_dsx_encoder import DsxEncoderConfig
from .families import Family, Head
from .families_rotary import PROJECTIONS, one_rope_of, pooling_of, rope_of, shared_from_dsx, shared_to_dsx

NOMIC_TRUNK = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
    "embeddings.LayerNorm": "embeddings.norm",
    **PROJECTIONS,
    "layers.{}.post_attention_layernorm": "layers.{}.attention_norm",
    "layers.{}.post_mlp_layernorm": "layers.{}.mlp_norm",
}
NOMIC_HEADS = {
    "": Head("NomicBertModel", {}),
    "MaskedLM": Head(
        "NomicBertForMaskedLM",
        {
            "cls.predictions.transform.dense": "prediction_head.dense",
            "cls.predictions.transform.layer_norm": "prediction_head.norm",
            "cls.predictions.decoder": "decoder",
            "cls.predictions.bias": "decoder.bias",  # its second name
        },
    ),
    "SequenceClassification": Head(
        "NomicBertForSequenceClassification",
        {"nomic_bert.pooler.dense": "pooler.dense", "classifier": "classifier"},
    ),
    "TokenClassification": Head("NomicBertForTokenClassification", {"classifier": "classifier"}),
}


def check_nomic_origin(stock: PreTrainedConfig) -> None:
    """Refuse fields of the first, GPT-2 like NomicBERT configuration that the stock class reads past.

    Raises:
        ValueError: Such a field says another thing than the stock class does.
    """
    rope = stock.rope_parameters
    done = {
        "n_head": stock.num_attention_heads,
        "layer_norm_epsilon": stock.layer_norm_eps,
        "rotary_emb_base": rope["rope_theta"],
        "rotary_scaling_factor": rope.get("factor"),
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "prenorm": False,
        "parallel_block": False,
    }
    for name, value in done.items():
        if getattr(stock, name, value) != value:
            raise ValueError(
                f"{name} ({getattr(stock, name)!r}) in the NomicBERT configuration is not read by transformers, which "
                f"computes with {value!r}; write it into the fields that are read (num_attention_heads, "
                "layer_norm_eps, rope_parameters), or remove it where the value computed with is the right one."
            )


def nomic_to_dsx(stock: PreTrainedConfig) -> dict[str, Any]:
    """NomicBERT (https://arxiv.org/abs/2402.01613): post-norm, gated, rotary, token types."""
    check_nomic_origin(stock)
    return shared_to_dsx(
        stock,
        hidden_act=stock.hidden_act,
        norm_position="post",
        norm_eps=stock.layer_norm_eps,
        embedding_norm=True,
        type_vocab_size=stock.type_vocab_size,
        embedding_dropout=stock.hidden_dropout_prob,
        attention_dropout=stock.attention_probs_dropout_prob,
        hidden_dropout=stock.hidden_dropout_prob,
        classifier_dropout=stock.classifier_dropout,
    )


def nomic_from_dsx(config: DsxEncoderConfig) -> dict[str, Any]:
    """Arguments of `NomicBertConfig`."""
    return shared_from_dsx(
        config,
        pad_token_id=config.pad_token_id or 0,
        hidden_act=config.hidden_act,
        layer_norm_eps=config.norm_eps,
        type_vocab_size=config.type_vocab_size,
        rope_parameters=one_rope_of(config),
        hidden_dropout_prob=float(config.hidden_dropout),
        attention_probs_dropout_prob=float(config.attention_dropout),
        classifier_dropout=None if config.classifier_dropout is None else float(config.classifier_dropout),
    )


MODERN_TRUNK = {
    "embeddings.tok_embeddings": "embeddings.word_embeddings",
    "embeddings.norm": "embeddings.norm",
    "layers.{}.attn_norm": "layers.{}.attention_norm",  # layer 0 has none on both sides
    "layers.{}.attn.Wqkv": "layers.{}.attention.qkv_proj",
    "layers.{}.attn.Wo": "layers.{}.attention.out_proj",
    "layers.{}.mlp_norm": "layers.{}.mlp_norm",
    "layers.{}.mlp.Wi[0]": "layers.{}.mlp.gate_proj",
    "layers.{}.mlp.Wi[1]": "layers.{}.mlp.up_proj",
    "layers.{}.mlp.Wo": "layers.{}.mlp.down_proj",
    "final_norm": "final_norm",
}


def modern_head(stock_class_name: str, transform: str, classifier: str) -> Head:
    """The one head of ModernBERT, a dense with activation and norm before a linear, under our names for it."""
    output = "decoder" if classifier == "decoder" else "classifier"
    keys = {"head.dense": f"{transform}.dense", "head.norm": f"{transform}.norm", output: classifier}
    return Head(stock_class_name, keys)


MODERN_HEADS = {
    "": Head("ModernBertModel", {}),
    "MaskedLM": modern_head("ModernBertForMaskedLM", "prediction_head", "decoder"),
    "SequenceClassification": modern_head("ModernBertForSequenceClassification", "pooler", "classifier"),
    "TokenClassification": modern_head("ModernBertForTokenClassification", "transform", "classifier"),
    "QuestionAnswering": modern_head("ModernBertForQuestionAnswering", "transform", "qa_outputs"),
    "MultipleChoice": modern_head("ModernBertForMultipleChoice", "pooler", "classifier"),
}


def modern_to_dsx(stock: PreTrainedConfig) -> dict[str, Any]:
    """ModernBERT (https://arxiv.org/abs/2412.13663): pre-norm, gated, windows, two RoPE bases, transformed tokens."""
    return shared_to_dsx(
        stock,
        hidden_act=stock.hidden_activation,
        mlp_bias=stock.mlp_bias,
        attention_bias=stock.attention_bias,
        norm_eps=stock.norm_eps,
        norm_bias=stock.norm_bias,
        embedding_norm=True,
        first_attention_norm=False,
        layer_types=list(stock.layer_types),
        sliding_window=stock.sliding_window,
        embedding_dropout=stock.embedding_dropout,
        attention_dropout=stock.attention_dropout,
        hidden_dropout=0.0,
        mlp_dropout=stock.mlp_dropout,
        classifier_dropout=stock.classifier_dropout,
        classifier_pooling=stock.classifier_pooling,
        classifier_activation=stock.classifier_activation,
        classifier_bias=stock.classifier_bias,
        classifier_norm=True,
        transform_tokens=True,
        prediction_activation=stock.classifier_activation,
        decoder_bias=stock.decoder_bias,
        initializer="scaled_normal",
    )


def modern_from_dsx(config: DsxEncoderConfig) -> dict[str, Any]:
    """Arguments of `ModernBertConfig`, which has one activation for the heads of all kinds."""
    activation = config.classifier_activation
    if "MaskedLM" in (config.architectures or [""])[0]:
        activation = config.prediction_activation
    rate = config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout
    return shared_from_dsx(
        config,
        cls_token_id=config.cls_token_id,
        sep_token_id=config.sep_token_id,
        hidden_activation=config.hidden_act,
        mlp_bias=config.mlp_bias,
        attention_bias=config.attention_bias,
        norm_eps=config.norm_eps,
        norm_bias=config.norm_bias,
        layer_types=list(config.layer_types),
        rope_parameters=rope_of(config),
        local_attention=2 * (config.sliding_window or 64),
        embedding_dropout=config.embedding_dropout,
        attention_dropout=config.attention_dropout,
        mlp_dropout=config.mlp_dropout,
        classifier_dropout=rate,
        classifier_pooling=pooling_of(config, {"cls": "cls", "mean": "mean"}),
        classifier_activation=activation or "gelu",
        classifier_bias=config.classifier_bias,
        decoder_bias=config.decoder_bias,
    )


FAMILIES = (
    Family("nomic_bert", "nomic_bert", NOMIC_TRUNK, NOMIC_HEADS, nomic_to_dsx, nomic_from_dsx),
    Family("modernbert", "model", MODERN_TRUNK, MODERN_HEADS, modern_to_dsx, modern_from_dsx),
    *families_euro.FAMILIES,
)

__all__ = ["FAMILIES"]
