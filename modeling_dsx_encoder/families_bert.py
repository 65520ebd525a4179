"""BERT and its kin: learned positions, biases everywhere, a classic feed-forward.

`FAMILIES` holds bert, roberta, xlm-roberta, camembert, roberta-prelayernorm, distilbert, electra and mpnet.
"""

from transformers import PreTrainedConfig

from .configuration_dsx_encoder import DsxEncoderConfig
from .families import Family, Head

# What BERT and its kin share; each family changes what it does otherwise.
SHARED_FIELDS = {
    "gated_mlp": False,
    "mlp_bias": True,
    "attention_bias": True,
    "norm_position": "post",
    "norm_type": "layer_norm",
    "norm_bias": True,
    "embedding_norm": True,
    "position_embedding_type": "learned",
    "scale_embeddings": False,
    "classifier_pooling": "cls",
    "classifier_activation": "tanh",
    "add_pooling_layer": True,
    "mlp_dropout": 0.0,
}
BERT_EMBEDDINGS = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
    "embeddings.position_embeddings": "positions.table",
    "embeddings.LayerNorm": "embeddings.norm",
}
BERT_LAYERS = {
    "encoder.layer.{}.attention.self.query": "layers.{}.attention.qkv_proj[0]",
    "encoder.layer.{}.attention.self.key": "layers.{}.attention.qkv_proj[1]",
    "encoder.layer.{}.attention.self.value": "layers.{}.attention.qkv_proj[2]",
    "encoder.layer.{}.attention.output.dense": "layers.{}.attention.out_proj",
    "encoder.layer.{}.attention.output.LayerNorm": "layers.{}.attention_norm",
    "encoder.layer.{}.intermediate.dense": "layers.{}.mlp.up_proj",
    "encoder.layer.{}.output.dense": "layers.{}.mlp.down_proj",
    "encoder.layer.{}.output.LayerNorm": "layers.{}.mlp_norm",
}
BERT_PREDICTIONS = {
    "cls.predictions.transform.dense": "prediction_head.dense",
    "cls.predictions.transform.LayerNorm": "prediction_head.norm",
    "cls.predictions.decoder": "decoder",
    "cls.predictions.bias": "decoder.bias",  # a second name of the decoder's bias, which alone is computed with
}


def special_ids(config: PreTrainedConfig) -> dict:
    """Token numbers that both configurations name; of several ends of text the first."""
    eos = config.eos_token_id
    return {
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if isinstance(eos, list) else eos,
    }


def refuse_decoders(config: PreTrainedConfig) -> None:
    """Refuse a configuration of another model under the same name.

    Raises:
        ValueError: Attention is causal or crosses to an encoder, or its scores have another position scheme.
    """
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    for name, value, wanted in (
        ("is_decoder", getattr(config, "is_decoder", False), False),
        ("add_cross_attention", getattr(config, "add_cross_attention", False), False),
        ("position_embedding_type", positions, "absolute"),
    ):
        if value != wanted:
            raise ValueError(
                f"the {config.model_type} configuration has {name}={value!r}, but only one with {name}={wanted!r} "
                "can be converted."
            )


def bert_to_dsx(config: PreTrainedConfig) -> dict:
    """Fields of a DSX encoder that computes what this `BertConfig` says."""
    refuse_decoders(config)
    return SHARED_FIELDS | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
        "norm_eps": config.layer_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.type_vocab_size,
        "embedding_dropout": config.hidden_dropout_prob,
        "hidden_dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "classifier_dropout": getattr(config, "classifier_dropout", None),
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        **special_ids(config),
    }


def bert_from_dsx(config: DsxEncoderConfig) -> dict:
    """Fields of the `BertConfig` that comes nearest."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
        "layer_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.type_vocab_size,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "classifier_dropout": config.classifier_dropout,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        **special_ids(config),
    }


BERT = Family(
    name="bert",
    trunk_prefix="bert",
    keys=BERT_EMBEDDINGS | BERT_LAYERS,
    heads={
        "": Head("BertModel", {"pooler.dense": "pooler.dense"}),
        "MaskedLM": Head("BertForMaskedLM", BERT_PREDICTIONS),
        "SequenceClassification": Head(
            "BertForSequenceClassification", {"bert.pooler.dense": "pooler.dense", "classifier": "classifier"}
        ),
        "TokenClassification": Head("BertForTokenClassification", {"classifier": "classifier"}),
        "QuestionAnswering": Head("BertForQuestionAnswering", {"qa_outputs": "qa_outputs"}),
        "MultipleChoice": Head(
            "BertForMultipleChoice", {"bert.pooler.dense": "pooler.dense", "classifier": "classifier"}
        ),
    },
    to_dsx=bert_to_dsx,
    from_dsx=bert_from_dsx,
    pretraining={
        "MaskedLM": Head(
            "BertForPreTraining",
            BERT_PREDICTIONS | {"bert.pooler.dense": None, "cls.seq_relationship": None},
        ),
        "": Head("BertForNextSentencePrediction", {"bert.pooler.dense": "pooler.dense", "cls.seq_relationship": None}),
    },
)

FAMILIES = (BERT,)
