"""Presets of encoders that many people have: each says what the stock configuration of the same name says."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from modeling_dsx_encoder import DsxEncoderConfig, DsxEncoderModel
from modeling_dsx_encoder.families import find_family
from modeling_dsx_encoder.presets import load_preset

# What the published configurations hold, by model_type; what a class of transformers has as its default stands here
# all the same where it makes the size.
BERT_BASE = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
ROBERTA_BASE = BERT_BASE | {
    "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "type_vocab_size": 1,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
MPNET_BASE = {key: value for key, value in ROBERTA_BASE.items() if key != "type_vocab_size"}
# The published ModernBERT configurations pool by the mean; Ettin and mmBERT have one RoPE base for all layers.
MODERN = {
    "max_position_embeddings": 8192, "norm_eps": 1e-5, "local_attention": 128, "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "classifier_pooling": "mean",
}  # fmt: skip
ONE_BASE = MODERN | {"local_rope_theta": 160000.0}
MODERN_IDS = {
    "vocab_size": 50368, "pad_token_id": 50283, "bos_token_id": 50281, "eos_token_id": 50282, "cls_token_id": 50281,
    "sep_token_id": 50282,
}  # fmt: skip
GEMMA_IDS = {
    "vocab_size": 256000, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "cls_token_id": 1,
    "sep_token_id": 1, "mask_token_id": 4,
}  # fmt: skip


def sizes(hidden_size, intermediate_size, num_hidden_layers, num_attention_heads):
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
    }


# Name: model_type, fields, and how many parameters the published trunk has, pooler included where there is one.
KNOWN = {
    "bert-base-uncased": ("bert", BERT_BASE | {"vocab_size": 30522}, 109_482_240),
    "bert-base-chinese": ("bert", BERT_BASE | {"vocab_size": 21128}, 102_267_648),
    "chinese-roberta-wwm-ext": ("bert", BERT_BASE | {"vocab_size": 21128}, 102_267_648),
    "minilm-l6": ("bert", BERT_BASE | {"vocab_size": 30522} | sizes(384, 1536, 6, 12), 22_713_216),
    "roberta-base": ("roberta", ROBERTA_BASE | {"vocab_size": 50265}, 124_645_632),
    "xlm-roberta-base": ("xlm-roberta", ROBERTA_BASE | {"vocab_size": 250002}, 278_043_648),
    "camembert-base": (
        "camembert",
        ROBERTA_BASE | {"vocab_size": 32005, "bos_token_id": 5, "eos_token_id": 6},
        110_621_952,
    ),
    "distilbert-base": (
        "distilbert",
        {
            "vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "activation": "gelu",
            "max_position_embeddings": 512,
        },
        66_362_880,
    ),
    "electra-small": (
        "electra",
        BERT_BASE | {"vocab_size": 30522, "embedding_size": 128} | sizes(256, 1024, 12, 4),
        13_483_008,
    ),
    "electra-base": ("electra", BERT_BASE | {"vocab_size": 30522, "embedding_size": 768}, 108_891_648),
    "mpnet-base": (
        "mpnet", MPNET_BASE | {"vocab_size": 30527, "relative_attention_num_buckets": 32}, 109_486_464
    ),
    "nomic-embed-v1.5": (
        "nomic_bert",
        {
            "vocab_size": 30528, "max_position_embeddings": 2048, "layer_norm_eps": 1e-12, "type_vocab_size": 2,
            "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        } | sizes(768, 3072, 12, 12),
        136_731_648,
    ),
    "modernbert-base": ("modernbert", MODERN | MODERN_IDS | sizes(768, 1152, 22, 12), 149_014_272),
    "modernbert-large": ("modernbert", MODERN | MODERN_IDS | sizes(1024, 2624, 28, 16), 394_781_696),
    "ettin-17m": (
        "modernbert", ONE_BASE | MODERN_IDS | sizes(256, 384, 7, 4) | {"max_position_embeddings": 7999}, 16_797_440
    ),
    "mmbert-base": ("modernbert", ONE_BASE | GEMMA_IDS | sizes(768, 1152, 22, 12), 306_939_648),
    "eurobert-210m": (
        "eurobert",
        {
            "vocab_size": 128256, "num_key_value_heads": 12, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
            "pad_token_id": 128001, "bos_token_id": 128000, "eos_token_id": 128001, "mask_token_id": 128002,
            "classifier_pooling": "late", "tie_word_embeddings": False,
        } | sizes(768, 3072, 12, 12),
        211_766_016,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_size_is_what_its_stock_configuration_says(name):
    model_type, fields, _ = KNOWN[name]
    stock = AutoConfig.for_model(model_type, **fields)
    assert load_preset(name).to_dict() == DsxEncoderConfig(**find_family(model_type).to_dsx(stock)).to_dict()


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_size_has_as_many_parameters_as_the_stock_trunk(name):
    model_type, fields, wanted = KNOWN[name]
    with torch.device("meta"):
        stock = AutoModel.from_config(AutoConfig.for_model(model_type, **fields))
        ours = DsxEncoderModel(load_preset(name))
    assert stock.num_parameters() == wanted
    assert ours.num_parameters() == wanted
