"""DistilBERT and MPNet: what BERT computes, under other names.

- DistilBERT (https://arxiv.org/abs/1910.01108): no token types, no pooler, ReLU in front of its classifiers
- MPNet (https://arxiv.org/abs/2004.09297): learned positions and T5's bias, shared by the layers
"""

from transformers import PreTrainedConfig

from .configuration_dsx_encoder import DsxEncoderConfig
from .families import Family, Head
from .families_bert import (
    CLASSIFIER,
    LM_HEAD,
    POOLER,
    QA_OUTPUTS,
    SHARED_FIELDS,
    bert_from_dsx,
    bert_to_dsx,
    pooler_of,
    refuse_other_models,
    special_ids,
)

WORDS_AND_POSITIONS = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "embeddings.position_embeddings": "positions.table",
    "embeddings.LayerNorm": "embeddings.norm",
}


def distilbert_to_dsx(config: PreTrainedConfig) -> dict:
    """Fields of a DSX encoder that computes what this `DistilBertConfig` says."""
    refuse_other_models(config)
    return SHARED_FIELDS | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.hidden_dim,
        "hidden_act": config.activation,
        "norm_eps": 1e-12,  # no field of theirs
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": 0,
        "add_pooling_layer": False,
        "classifier_activation": "relu",
        "embedding_dropout": config.dropout,
        "hidden_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "classifier_dropout": config.seq_classif_dropout,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        **special_ids(config),
    }


def distilbert_from_dsx(config: DsxEncoderConfig) -> dict:
    """Fields of the `DistilBertConfig` that comes nearest."""
    dropout = config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "hidden_dim": config.intermediate_size,
        "activation": config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings,
        "dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "seq_classif_dropout": dropout,
        "qa_dropout": dropout,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        **special_ids(config),
    }


DISTILBERT_CLASSIFIER = {"pre_classifier": "pooler.dense", "classifier": "classifier"}
DISTILBERT = Family(
    name="distilbert",
    trunk_prefix="distilbert",
    keys=WORDS_AND_POSITIONS
    | {
        "transformer.layer.{}.attention.q_lin": "layers.{}.attention.qkv_proj[0]",
        "transformer.layer.{}.attention.k_lin": "layers.{}.attention.qkv_proj[1]",
        "transformer.layer.{}.attention.v_lin": "layers.{}.attention.qkv_proj[2]",
        "transformer.layer.{}.attention.out_lin": "layers.{}.attention.out_proj",
        "transformer.layer.{}.sa_layer_norm": "layers.{}.attention_norm",
        "transformer.layer.{}.ffn.lin1": "layers.{}.mlp.up_proj",
        "transformer.layer.{}.ffn.lin2": "layers.{}.mlp.down_proj",
        "transformer.layer.{}.output_layer_norm": "layers.{}.mlp_norm",
    },
    heads={
        "": Head("DistilBertModel"),
        "MaskedLM": Head(
            "DistilBertForMaskedLM",
            {
                "vocab_transform": "prediction_head.dense",
                "vocab_layer_norm": "prediction_head.norm",
                "vocab_projector": "decoder",
            },
        ),
        "SequenceClassification": Head("DistilBertForSequenceClassification", DISTILBERT_CLASSIFIER),
        "TokenClassification": Head("DistilBertForTokenClassification", CLASSIFIER),
        "QuestionAnswering": Head("DistilBertForQuestionAnswering", QA_OUTPUTS),
        "MultipleChoice": Head("DistilBertForMultipleChoice", DISTILBERT_CLASSIFIER),
    },
    to_dsx=distilbert_to_dsx,
    from_dsx=distilbert_from_dsx,
)

# Written into MPNet's code, whatever its configuration says.
MPNET_OFFSET, MPNET_BUCKETS, MPNET_DISTANCE = 2, 32, 128


def mpnet_to_dsx(config: PreTrainedConfig) -> dict:
    """Fields of a DSX encoder that computes what this `MPNetConfig` says.

    Raises:
        ValueError: Another number of buckets, or another padding, than the stock model computes with.
    """
    for name, wanted in (("relative_attention_num_buckets", MPNET_BUCKETS), ("pad_token_id", MPNET_OFFSET - 1)):
        if getattr(config, name) != wanted:
            raise ValueError(
                f"the mpnet configuration has {name}={getattr(config, name)}, but the stock model always computes "
                f"with {wanted}; only such a checkpoint can be converted."
            )
    return bert_to_dsx(config) | {
        "type_vocab_size": 0,
        "position_embedding_type": "learned_relative_bias",
        "relative_attention_num_buckets": MPNET_BUCKETS,
        "relative_attention_max_distance": MPNET_DISTANCE,
        "position_offset": MPNET_OFFSET,
        "max_position_embeddings": config.max_position_embeddings - MPNET_OFFSET,
        "prediction_activation": "gelu",
    }


def mpnet_from_dsx(config: DsxEncoderConfig) -> dict:
    """Fields of the `MPNetConfig` that comes nearest."""
    fields = bert_from_dsx(config)
    for name in ("type_vocab_size", "classifier_dropout"):  # no fields of theirs
        del fields[name]
    fields |= {"max_position_embeddings": config.max_position_embeddings + MPNET_OFFSET}
    return fields | {"pad_token_id": MPNET_OFFSET - 1}


MPNET = Family(
    name="mpnet",
    trunk_prefix="mpnet",
    keys=WORDS_AND_POSITIONS
    | {
        "encoder.relative_attention_bias": "positions.relative_attention_bias",
        "encoder.layer.{}.attention.attn.q": "layers.{}.attention.qkv_proj[0]",
        "encoder.layer.{}.attention.attn.k": "layers.{}.attention.qkv_proj[1]",
        "encoder.layer.{}.attention.attn.v": "layers.{}.attention.qkv_proj[2]",
        "encoder.layer.{}.attention.attn.o": "layers.{}.attention.out_proj",
        "encoder.layer.{}.attention.LayerNorm": "layers.{}.attention_norm",
        "encoder.layer.{}.intermediate.dense": "layers.{}.mlp.up_proj",
        "encoder.layer.{}.output.dense": "layers.{}.mlp.down_proj",
        "encoder.layer.{}.output.LayerNorm": "layers.{}.mlp_norm",
    },
    heads={
        "": Head("MPNetModel", POOLER),
        "MaskedLM": Head("MPNetForMaskedLM", LM_HEAD),
        "SequenceClassification": Head(
            "MPNetForSequenceClassification", {"classifier.dense": "pooler.dense", "classifier.out_proj": "classifier"}
        ),
        "TokenClassification": Head("MPNetForTokenClassification", CLASSIFIER),
        "QuestionAnswering": Head("MPNetForQuestionAnswering", QA_OUTPUTS),
        "MultipleChoice": Head("MPNetForMultipleChoice", pooler_of("mpnet") | CLASSIFIER),
    },
    to_dsx=mpnet_to_dsx,
    from_dsx=mpnet_from_dsx,
)

FAMILIES = (DISTILBERT, MPNET)
