"""The configuration: derived defaults, JSON, aliases, and every rule with the values its message must name."""

import copy
import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from tiny import POSITIONS, tiny_config
from transformers import AutoConfig, PretrainedConfig

from modeling_dsx_encoder import DsxEncoderConfig

INVALID = (ValueError, TypeError, StrictDataclassError)
ALIASES = {
    "d_model": ("hidden_size", 48),
    "num_heads": ("num_attention_heads", 2),
    "num_layers": ("num_hidden_layers", 3),
    "d_ff": ("intermediate_size", 72),
    "feedforward_size": ("intermediate_size", 80),
    "max_len": ("max_position_embeddings", 33),
}


def test_bare_configuration_is_the_encoder_of_the_specification():
    config = DsxEncoderConfig()
    assert isinstance(config, PretrainedConfig)
    expected = {
        "model_type": "dsx_encoder",
        "vocab_size": 30522,
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "hidden_act": "gelu",
        "gated_mlp": True,
        "mlp_bias": False,
        "attention_bias": False,
        "norm_position": "pre",
        "norm_type": "layer_norm",
        "norm_eps": 1e-5,
        "norm_bias": True,
        "embedding_norm": False,
        "position_embedding_type": "sinusoidal",
        "max_position_embeddings": 512,
        "position_offset": 0,
        "type_vocab_size": 0,
        "sliding_window": None,
        "classifier_pooling": "cls",
        "initializer": "normal",
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "padding_free": True,
        "sparse_prediction": True,
        "pad_token_id": 0,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_derived_defaults_follow_the_widths():
    config = DsxEncoderConfig(hidden_size=48, num_attention_heads=6, num_hidden_layers=3, hidden_dropout=0.25)
    assert config.num_key_value_heads == 6
    assert config.intermediate_size == 4 * 48
    assert list(config.layer_types) == ["full_attention"] * 3


@pytest.mark.parametrize("scheme", POSITIONS)
def test_json_round_trip_keeps_every_field(scheme, tmp_path):
    config = tiny_config(
        position_embedding_type=scheme,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=3,
        norm_type="rms_norm",
        norm_position="post",
        type_vocab_size=2,
        num_key_value_heads=2,
        classifier_pooling="mean",
        classifier_dropout=0.3,
        num_labels=2,
        id2label={0: "负面", 1: "正面"},
        label2id={"负面": 0, "正面": 1},
    )
    config.save_pretrained(tmp_path)
    for loader in (DsxEncoderConfig, AutoConfig):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is DsxEncoderConfig
        assert loaded.to_dict() == {**config.to_dict(), "_name_or_path": loaded._name_or_path}
    again = DsxEncoderConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    assert again.to_dict() == config.to_dict()
    assert again.id2label == {0: "负面", 1: "正面"}


def test_nested_rope_parameters_round_trip(tmp_path):
    bases = {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = tiny_config(
        position_embedding_type="rope",
        rope_parameters=copy.deepcopy(bases),
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=2,
    )
    config.save_pretrained(tmp_path)
    loaded = DsxEncoderConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert {kind: loaded.rope_parameters[kind]["rope_theta"] for kind in bases} == {
        "full_attention": 160000.0,
        "sliding_attention": 10000.0,
    }


def test_auto_map_is_complete_in_what_is_saved(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    prefix = "modeling_dsx_encoder.DsxEncoder"
    assert saved["auto_map"] == {
        "AutoConfig": "configuration_dsx_encoder.DsxEncoderConfig",
        "AutoModel": f"{prefix}Model",
        "AutoModelForMaskedLM": f"{prefix}ForMaskedLM",
        "AutoModelForSequenceClassification": f"{prefix}ForSequenceClassification",
        "AutoModelForTokenClassification": f"{prefix}ForTokenClassification",
        "AutoModelForQuestionAnswering": f"{prefix}ForQuestionAnswering",
        "AutoModelForMultipleChoice": f"{prefix}ForMultipleChoice",
    }
    assert saved["model_type"] == "dsx_encoder"


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_read_write_and_construct(alias):
    name, value = ALIASES[alias]
    built = DsxEncoderConfig(**{alias: value})
    assert getattr(built, name) == value == getattr(built, alias)
    config = DsxEncoderConfig()
    setattr(config, alias, value)
    assert getattr(config, name) == value
    setattr(config, name, value + 8)
    assert getattr(config, alias) == value + 8
    saved = built.to_dict()
    assert saved[name] == value
    assert alias not in saved


def test_alias_of_the_width_is_seen_by_the_derived_defaults():
    config = DsxEncoderConfig(d_model=64, num_heads=4, num_layers=2)
    assert (config.intermediate_size, config.num_key_value_heads, len(config.layer_types)) == (256, 4, 2)


def test_mutable_fields_are_not_shared():
    first, second = DsxEncoderConfig(), DsxEncoderConfig()
    first.layer_types[0] = "sliding_attention"
    first.auto_map["AutoModel"] = "other.Other"
    first.id2label[0] = "changed"
    fresh = DsxEncoderConfig()
    for config in (second, fresh):
        assert config.layer_types[0] == "full_attention"
        assert config.auto_map["AutoModel"] == "modeling_dsx_encoder.DsxEncoderModel"
        assert config.id2label[0] != "changed"
    given = {"rope_type": "default", "rope_theta": 500.0}
    kinds = ["full_attention", "full_attention"]
    one = tiny_config(position_embedding_type="rope", rope_parameters=given, layer_types=kinds)
    two = tiny_config(position_embedding_type="rope", rope_parameters=given, layer_types=kinds)
    one.rope_parameters["rope_theta"] = 7.0
    one.layer_types[0] = "sliding_attention"
    assert two.rope_parameters["rope_theta"] == 500.0
    assert two.layer_types[0] == "full_attention"
    assert given["rope_theta"] == 500.0
    assert kinds == ["full_attention", "full_attention"]


def test_deep_copy_is_equal_and_apart():
    config = tiny_config(position_embedding_type="rope")
    twin = copy.deepcopy(config)
    assert twin.to_dict() == config.to_dict()
    twin.layer_types[0] = "sliding_attention"
    assert config.layer_types[0] == "full_attention"


ROPE_BROKEN = {"position_embedding_type": "rope", "hidden_size": 36, "num_attention_heads": 4}
SLIDING = ["full_attention", "sliding_attention"]
RULES = {
    "heads divide the width": ({"hidden_size": 30, "num_attention_heads": 4}, r"(?s)hidden_size.*30.*4"),
    "groups divide the heads": (
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        r"(?s)(?=.*num_attention_heads.*4)(?=.*num_key_value_heads.*3)",
    ),
    "no more groups than heads": ({"num_attention_heads": 4, "num_key_value_heads": 8}, r"(?s)num_key_value_heads"),
    "one layer type a layer": ({"layer_types": ["full_attention"] * 3}, r"(?s)layer_types.*3.*num_hidden_layers.*2"),
    "known layer types": ({"layer_types": ["full_attention", "dense"]}, r"(?s)layer_types.*dense"),
    "sliding needs a window": ({"layer_types": SLIDING}, r"(?s)sliding_window"),
    "rope scaling wants its factor": (
        {"position_embedding_type": "rope", "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        r"(?s)rope_parameters.*linear.*factor",
    ),
    "rope parameters want rope": (
        {"position_embedding_type": "alibi", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        r"(?s)rope_parameters.*position_embedding_type.*alibi",
    ),
    "a base for every layer type": (
        {
            "position_embedding_type": "rope",
            "layer_types": SLIDING,
            "sliding_window": 2,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        },
        r"(?s)rope_parameters.*sliding_attention",
    ),
    "even buckets": (
        {"position_embedding_type": "relative_bias", "relative_attention_num_buckets": 7},
        r"(?s)relative_attention_num_buckets.*7",
    ),
    "distance beyond the exact buckets": (
        {"position_embedding_type": "relative_bias", "relative_attention_max_distance": 8},
        r"(?s)relative_attention_num_buckets.*32.*relative_attention_max_distance.*8",
    ),
    "window not zero": ({"layer_types": SLIDING, "sliding_window": 0}, r"(?s)sliding_window.*0"),
    "window not negative": ({"layer_types": SLIDING, "sliding_window": -1}, r"(?s)sliding_window.*-1"),
    "rope wants even heads": (ROPE_BROKEN, r"(?s)(rope|RoPE).*9"),
    "known activation": ({"hidden_act": "geluu"}, r"(?s)hidden_act.*geluu"),
    "token types not negative": ({"type_vocab_size": -1}, r"(?s)type_vocab_size.*-1"),
    "pad token in the vocabulary": ({"pad_token_id": 99}, r"(?s)pad_token_id.*99.*vocab_size"),
    "pad token far out": ({"pad_token_id": 500}, r"(?s)pad_token_id.*500"),
    "offset not negative": ({"position_offset": -2}, r"(?s)position_offset.*-2"),
    "global tokens not negative": ({"num_global_tokens": -1}, r"(?s)num_global_tokens.*-1"),
    "eps positive": ({"norm_eps": -1e-5}, r"(?s)norm_eps.*-1e-05"),
    "range not negative": ({"initializer_range": -0.02}, r"(?s)initializer_range.*-0\.02"),
    "rope type known": (
        {"position_embedding_type": "rope", "rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        r"(?s)rope.*spiral",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_names_field_and_value(rule):
    fields, message = RULES[rule]
    with pytest.raises(INVALID, match=message):
        tiny_config(**fields)


@pytest.mark.parametrize(
    "name",
    ["embedding_dropout", "attention_dropout", "hidden_dropout", "mlp_dropout", "classifier_dropout"],
)
@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_dropout_is_a_probability(name, rate):
    with pytest.raises(INVALID, match=rf"(?s){name}.*{rate}"):
        tiny_config(**{name: rate})


@pytest.mark.parametrize("name", ["embedding_dropout", "attention_dropout", "hidden_dropout", "mlp_dropout"])
def test_whole_numbers_are_rates_too(name):
    assert getattr(tiny_config(**{name: 0}), name) == 0


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "max_position_embeddings",
        "relative_attention_num_buckets",
        "relative_attention_max_distance",
    ],
)
@pytest.mark.parametrize("value", [0, -4])
def test_sizes_are_positive(name, value):
    with pytest.raises(INVALID, match=rf"(?s){name}.*{value}"):
        tiny_config(position_embedding_type="relative_bias", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_position", "middle"),
        ("norm_type", "batch_norm"),
        ("position_embedding_type", "rotary"),
        ("classifier_pooling", "last"),
        ("prediction_head", "linear"),
        ("initializer", "orthogonal"),
    ],
)
def test_literals_are_closed(name, value):
    with pytest.raises(INVALID, match=rf"(?s){name}.*{value}"):
        tiny_config(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", "32"), ("gated_mlp", "yes"), ("hidden_size", 32.0), ("vocab_size", True)],
)
def test_types_are_checked(name, value):
    with pytest.raises(INVALID, match=rf"(?s){name}"):
        tiny_config(**{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classifier_activation": "tan"}, "classifier_activation.*tan"),
        ({"prediction_activation": "gelo"}, "prediction_activation.*gelo"),
        ({"classifier_activation": None, "classifier_norm": True}, "classifier_norm.*classifier_activation=None"),
        ({"classifier_activation": None, "transform_tokens": True}, "transform_tokens.*classifier_activation=None"),
        ({"first_attention_norm": False, "norm_position": "post"}, "first_attention_norm=False.*post"),
        ({"prediction_head": "none", "embedding_size": 20}, "prediction_head 'none'.*32.*20"),
        ({"embedding_size": 0}, "embedding_size.*0"),
    ],
)
def test_rules_about_heads_and_first_norms(fields, message):
    with pytest.raises(INVALID, match=f"(?s){message}"):
        tiny_config(**fields)


def test_odd_head_size_is_fine_without_rope():
    for scheme in POSITIONS:
        if scheme != "rope":
            assert tiny_config(**{**ROPE_BROKEN, "position_embedding_type": scheme}).hidden_size == 36


def test_one_head_is_legal():
    assert tiny_config(num_attention_heads=1).num_key_value_heads == 1


def test_rules_are_checked_again_at_save(tmp_path):
    config = tiny_config()
    config.num_attention_heads = 5
    with pytest.raises(INVALID, match=r"(?s)hidden_size.*32.*5"):
        config.save_pretrained(tmp_path)


def test_labels_may_be_named():
    config = tiny_config(num_labels=2, id2label={0: "差", 1: "好"}, label2id={"差": 0, "好": 1})
    assert config.num_labels == 2
    assert config.id2label[1] == "好"


def test_output_attentions_may_stand_in_the_configuration():
    config = tiny_config(output_attentions=True)
    assert config.output_attentions is True
