"""BERT and its kin: learned positions, biases everywhere, a classic feed-forward.

`FAMILIES` holds bert, roberta, xlm-roberta, camembert, roberta-prelayernorm and electra; distilbert and mpnet are in
families_kin.py.
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
BERT_PROJECTIONS = {
    "encoder.layer.{}.attention.self.query": "layers.{}.attention.qkv_proj[0]",
    "encoder.layer.{}.attention.self.key": "layers.{}.attention.qkv_proj[1]",
    "encoder.layer.{}.attention.self.value": "layers.{}.attention.qkv_proj[2]",
    "encoder.layer.{}.attention.output.dense": "layers.{}.attention.out_proj",
    "encoder.layer.{}.intermediate.dense": "layers.{}.mlp.up_proj",
    "encoder.layer.{}.output.dense": "layers.{}.mlp.down_proj",
}
BERT_LAYERS = BERT_PROJECTIONS | {
    "encoder.layer.{}.attention.output.LayerNorm": "layers.{}.attention_norm",
    "encoder.layer.{}.output.LayerNorm": "layers.{}.mlp_norm",
}
POOLER = {"pooler.dense": "pooler.dense"}
CLASSIFIER = {"classifier": "classifier"}
QA_OUTPUTS = {"qa_outputs": "qa_outputs"}
BERT_PREDICTIONS = {
    "cls.predictions.transform.dense": "prediction_head.dense",
    "cls.predictions.transform.LayerNorm": "prediction_head.norm",
    "cls.predictions.decoder": "decoder",
    "cls.predictions.bias": "decoder.bias",  # a second name of the decoder's bias, which alone is computed with
}
LM_HEAD = {
    "lm_head.dense": "prediction_head.dense",
    "lm_head.layer_norm": "prediction_head.norm",
    "lm_head.decoder": "decoder",
    "lm_head.bias": "decoder.bias",  # as in BERT
}


def pooler_of(trunk: str) -> dict[str, str]:
    """A head that looks through the trunk's pooler; ours has a pooler of its own."""
    return {f"{trunk}.pooler.dense": "pooler.dense"}


def special_ids(config: PreTrainedConfig) -> dict:
    """Token numbers that both configurations name; of several ends of text the first."""
    eos = config.eos_token_id
    return {
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if isinstance(eos, list) else eos,
    }


def refuse_other_models(config: PreTrainedConfig) -> None:
    """Refuse a configuration of another model under the same name.

    Raises:
        ValueError: Attention is causal or crosses to an encoder, or positions or feed-forward are of a kind that the
            classes of transformers do not have: they read past these fields and would compute something else.
    """
    wanted = {
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",  # others: "relative_key", "relative_key_query", "alibi"
        "feed_forward_type": "original",  # others: "geglu", "reglu"
    }
    found = {name: getattr(config, name, None) or value for name, value in wanted.items()}
    other = [name for name, value in wanted.items() if found[name] != value]
    if other:
        raise ValueError(
            f"the {config.model_type} configuration has {', '.join(f'{name}={found[name]!r}' for name in other)}, but "
            f"only one with {', '.join(f'{name}={wanted[name]!r}' for name in other)} can be converted: the "
            "classes of transformers compute no other encoder under this model_type, so the result could not be "
            "checked. Take a checkpoint of the family's own layout."
        )


def bert_to_dsx(config: PreTrainedConfig) -> dict:
    """Fields of a DSX encoder that computes what this `BertConfig` says."""
    refuse_other_models(config)
    return SHARED_FIELDS | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
        "norm_eps": config.layer_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": getattr(config, "type_vocab_size", 0),
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
        "": Head("BertModel", POOLER),
        "MaskedLM": Head("BertForMaskedLM", BERT_PREDICTIONS),
        "SequenceClassification": Head("BertForSequenceClassification", pooler_of("bert") | CLASSIFIER),
        "TokenClassification": Head("BertForTokenClassification", CLASSIFIER),
        "QuestionAnswering": Head("BertForQuestionAnswering", QA_OUTPUTS),
        "MultipleChoice": Head("BertForMultipleChoice", pooler_of("bert") | CLASSIFIER),
    },
    to_dsx=bert_to_dsx,
    from_dsx=bert_from_dsx,
    pretraining={
        "MaskedLM": Head(
            "BertForPreTraining", BERT_PREDICTIONS | {"bert.pooler.dense": None, "cls.seq_relationship": None}
        ),
        "": Head("BertForNextSentencePrediction", {"bert.pooler.dense": "pooler.dense", "cls.seq_relationship": None}),
    },
)


def roberta_to_dsx(config: PreTrainedConfig) -> dict:
    """RoBERTa: positions begin behind the padding's row, and the masked-LM head always takes GELU."""
    offset = config.pad_token_id + 1
    return bert_to_dsx(config) | {
        "position_offset": offset,
        "max_position_embeddings": config.max_position_embeddings - offset,
        "prediction_activation": "gelu",
    }


def roberta_from_dsx(config: DsxEncoderConfig) -> dict:
    """Fields of the `RobertaConfig` that comes nearest."""
    pad_token_id = 1 if config.pad_token_id is None else config.pad_token_id
    return bert_from_dsx(config) | {
        "pad_token_id": pad_token_id,
        "max_position_embeddings": config.max_position_embeddings + pad_token_id + 1,
    }


def roberta_heads(prefix: str, trunk: str) -> dict[str, Head]:
    """Heads of RoBERTa: a classifier with a map of its own, but a pooler for multiple choice."""
    dense = {"classifier.dense": "pooler.dense", "classifier.out_proj": "classifier"}
    return {
        "": Head(f"{prefix}Model", POOLER),
        "MaskedLM": Head(f"{prefix}ForMaskedLM", LM_HEAD),
        "SequenceClassification": Head(f"{prefix}ForSequenceClassification", dense),
        "TokenClassification": Head(f"{prefix}ForTokenClassification", CLASSIFIER),
        "QuestionAnswering": Head(f"{prefix}ForQuestionAnswering", QA_OUTPUTS),
        "MultipleChoice": Head(f"{prefix}ForMultipleChoice", pooler_of(trunk) | CLASSIFIER),
    }


ROBERTA, XLM_ROBERTA, CAMEMBERT = (
    Family(
        name=name,
        trunk_prefix="roberta",
        keys=BERT_EMBEDDINGS | BERT_LAYERS,
        heads=roberta_heads(prefix, "roberta"),
        to_dsx=roberta_to_dsx,
        from_dsx=roberta_from_dsx,
    )
    for name, prefix in (("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert"))
)

# Norms before the sub-layers, and one at the end (https://arxiv.org/abs/1904.01038).
ROBERTA_PRELAYERNORM = Family(
    name="roberta-prelayernorm",
    trunk_prefix="roberta_prelayernorm",
    keys=BERT_EMBEDDINGS
    | BERT_PROJECTIONS
    | {
        "encoder.layer.{}.attention.LayerNorm": "layers.{}.attention_norm",
        "encoder.layer.{}.intermediate.LayerNorm": "layers.{}.mlp_norm",
        "LayerNorm": "final_norm",
    },
    heads=roberta_heads("RobertaPreLayerNorm", "roberta_prelayernorm"),
    to_dsx=lambda config: roberta_to_dsx(config) | {"norm_position": "pre"},
    from_dsx=roberta_from_dsx,
)


def electra_to_dsx(config: PreTrainedConfig) -> dict:
    """ELECTRA: narrow embeddings, no pooler, GELU in its classifiers (https://arxiv.org/abs/2003.10555)."""
    is_choice = (config.architectures or [""])[0] == "ElectraForMultipleChoice"
    if is_choice and (config.summary_type != "first" or not config.summary_use_proj):
        raise ValueError(
            f"the electra configuration has summary_type={config.summary_type!r} and summary_use_proj="
            f"{config.summary_use_proj!r}, and only 'first' with a projection can be converted for multiple choice."
        )
    return bert_to_dsx(config) | {
        "embedding_size": config.embedding_size,
        "add_pooling_layer": False,
        "classifier_activation": (config.summary_activation or "linear") if is_choice else "gelu",
        "prediction_activation": "gelu",
    }


def electra_from_dsx(config: DsxEncoderConfig) -> dict:
    """Fields of the `ElectraConfig` that comes nearest."""
    summary = {"summary_activation": config.classifier_activation, "summary_last_dropout": config.hidden_dropout}
    return bert_from_dsx(config) | {"embedding_size": config.embedding_size} | summary


ELECTRA = Family(
    name="electra",
    trunk_prefix="electra",
    keys=BERT_EMBEDDINGS | {"embeddings_project": "embeddings.projection"} | BERT_LAYERS,
    heads={
        "": Head("ElectraModel"),
        "MaskedLM": Head(
            "ElectraForMaskedLM",
            {
                "generator_predictions.dense": "prediction_head.dense",
                "generator_predictions.LayerNorm": "prediction_head.norm",
                "generator_lm_head": "decoder",
            },
        ),
        "SequenceClassification": Head(
            "ElectraForSequenceClassification",
            {"classifier.dense": "pooler.dense", "classifier.out_proj": "classifier"},
        ),
        "TokenClassification": Head("ElectraForTokenClassification", CLASSIFIER),
        "QuestionAnswering": Head("ElectraForQuestionAnswering", QA_OUTPUTS),
        "MultipleChoice": Head("ElectraForMultipleChoice", {"sequence_summary.summary": "pooler.dense"} | CLASSIFIER),
    },
    to_dsx=electra_to_dsx,
    from_dsx=electra_from_dsx,
    pretraining={
        "": Head(
            "ElectraForPreTraining",
            {"discriminator_predictions.dense": None, "discriminator_predictions.dense_prediction": None},
        )
    },
)

FAMILIES = (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ROBERTA_PRELAYERNORM, ELECTRA)
