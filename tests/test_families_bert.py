"""Every BERT-like family becomes a DSX encoder and comes back: the same outputs, the same bits."""

import pytest
import torch
from stock import CONFIGURATIONS, differences, padded_batch, stock_config, stock_model

from modeling_dsx_encoder import DsxEncoderConfig, DsxEncoderModel
from modeling_dsx_encoder.conversion_models import to_dsx_model, to_stock_model
from modeling_dsx_encoder.families import HEAD_NAMES, find_family

FAMILY_NAMES = tuple(CONFIGURATIONS)
CASES = [(name, configuration) for name, group in CONFIGURATIONS.items() for configuration in group]
# What other heads compute with, how weights began, and labels, which travel by themselves.
NOT_OURS = {"summary_activation", "sinusoidal_pos_embds", "eos_token_id", "num_labels"}
LENGTHS = (40, 3, 17)


@pytest.mark.parametrize("head", HEAD_NAMES, ids=lambda head: head or "trunk")
@pytest.mark.parametrize(("family_name", "configuration"), CASES, ids=map("-".join, CASES))
def test_outputs_agree_on_real_tokens_and_weights_come_back_bit_equal(family_name, configuration, head):
    family = find_family(family_name)
    stock = stock_model(family.heads[head], stock_config(family_name, configuration))
    ours, name, moved = to_dsx_model(stock)
    assert name == head
    assert moved.dropped == []
    found = differences(stock, ours, name, LENGTHS)
    assert max(found.values()) <= 1e-5, found

    back, _, _ = to_stock_model(ours, family)
    state = stock.state_dict()
    assert type(back) is type(stock)
    assert set(back.state_dict()) == set(state)
    for key, tensor in back.state_dict().items():
        # A second bias that the untied stock model has, but never computes with.
        if key not in moved.differing:
            assert torch.equal(tensor, state[key]), key
    assert moved.differing == [] or not stock.config.tie_word_embeddings


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_configuration_comes_back_equal_in_what_it_computes(family_name):
    family = find_family(family_name)
    for configuration in CONFIGURATIONS[family_name]:
        stock = stock_config(family_name, configuration)
        back = family.config_class(**family.from_dsx(DsxEncoderConfig(**family.to_dsx(stock))))
        known = {
            key: value for key, value in stock.to_dict().items() if key in CONFIGURATIONS[family_name][configuration]
        }
        for key in set(known) - NOT_OURS:
            if key != "pad_token_id" or known[key] is not None:
                assert getattr(back, key) == known[key], key


PRETRAINING = [(name, head, entry) for name in FAMILY_NAMES for head, entry in find_family(name).pretraining.items()]


@pytest.mark.parametrize(("family_name", "head", "entry"), PRETRAINING, ids=lambda part: getattr(part, "name", None))
def test_pretraining_classes_lose_their_extra_head_and_say_so(family_name, head, entry):
    stock = stock_model(entry, stock_config(family_name, "small"))
    ours, name, moved = to_dsx_model(stock)
    assert name == head
    assert moved.dropped
    assert all("seq_relationship" in key or "discriminator" in key or "pooler" in key for key in moved.dropped)
    plain = find_family(family_name).heads[head]
    alone = stock_model(plain, stock_config(family_name, "small"))
    trunk = {
        key.removeprefix(f"{find_family(family_name).trunk_prefix}."): value
        for key, value in stock.state_dict().items()
    }
    alone.load_state_dict({key: stock.state_dict().get(key, trunk.get(key)) for key in alone.state_dict()})
    assert max(differences(alone, ours, name, LENGTHS).values()) <= 1e-5


def test_a_pooler_that_was_never_trained_stays_behind():
    stock = stock_model(find_family("bert").heads[""], stock_config("bert", "small"))
    ours, _, _ = to_dsx_model(stock, pooler=False)
    assert not ours.config.add_pooling_layer
    assert not any("pooler" in key for key in ours.state_dict())
    back, _, _ = to_stock_model(ours, find_family("bert"))
    assert back.pooler is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_keep_their_dtype_and_bits(dtype):
    stock = stock_model(find_family("bert").heads["MaskedLM"], stock_config("bert", "small")).to(dtype)
    ours, _, _ = to_dsx_model(stock)
    assert {tensor.dtype for tensor in ours.state_dict().values()} == {dtype}
    back, _, _ = to_stock_model(ours, find_family("bert"))
    assert all(torch.equal(tensor, stock.state_dict()[key]) for key, tensor in back.state_dict().items())


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_a_configuration_that_the_family_cannot_say_is_refused_by_field_and_value(family_name):
    model = DsxEncoderModel(DsxEncoderConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1))
    with pytest.raises(ValueError, match="gated_mlp is True, there False") as error:
        to_stock_model(model, find_family(family_name))
    assert "position_embedding_type is 'sinusoidal'" in str(error.value)
    assert "num_labels" not in str(error.value)


def test_a_head_field_stands_in_the_way_of_its_own_head_alone():
    stock = stock_model(find_family("bert").heads["TokenClassification"], stock_config("bert", "small"))
    ours, _, _ = to_dsx_model(stock, classifier_pooling="mean")
    to_stock_model(ours, find_family("bert"))
    stock = stock_model(find_family("bert").heads["SequenceClassification"], stock_config("bert", "small"))
    ours, _, _ = to_dsx_model(stock, classifier_pooling="mean")
    with pytest.raises(ValueError, match="classifier_pooling is 'mean', there 'cls'"):
        to_stock_model(ours, find_family("bert"))


def test_padding_by_which_a_stock_model_counts_positions_stands_in_the_way_where_it_differs():
    stock = stock_model(find_family("mpnet").heads[""], stock_config("mpnet", "small"))
    ours, _, _ = to_dsx_model(stock, pad_token_id=0)
    with pytest.raises(ValueError, match="pad_token_id is 0, there 1"):
        to_stock_model(ours, find_family("mpnet"))


def test_a_model_of_one_family_is_refused_by_another_with_the_fields_that_differ():
    stock = stock_model(find_family("bert").heads[""], stock_config("bert", "small"))
    ours, _, _ = to_dsx_model(stock)
    with pytest.raises(ValueError, match="position_offset is 0, there 1"):
        to_stock_model(ours, find_family("roberta"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key"),
        ("position_embedding_type", "relative_key_query"),
        ("position_embedding_type", "alibi"),
        ("feed_forward_type", "geglu"),
    ],
)
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_a_configuration_that_is_no_encoder_of_the_family_is_refused(family_name, field, value):
    config = stock_config(family_name, "small")
    setattr(config, field, value)
    with pytest.raises(ValueError, match=f"{family_name} configuration has {field}={value!r}, but only one with"):
        find_family(family_name).to_dsx(config)


@pytest.mark.parametrize("values", [("absolute", "original"), (None, None)])
def test_fields_that_say_what_the_stock_class_computes_anyway_are_no_obstacle(values):
    config = stock_config("bert", "small")
    plain = find_family("bert").to_dsx(config)
    config.position_embedding_type, config.feed_forward_type = values
    assert find_family("bert").to_dsx(config) == plain


@pytest.mark.parametrize("value", ["relative_key", "relative_key_query", "alibi"])
def test_the_stock_class_reads_past_other_positions_which_is_why_they_are_refused(value):
    entry = find_family("bert").heads[""]
    plain = stock_model(entry, stock_config("bert", "small"))
    other = stock_model(entry, stock_config("bert", "small", position_embedding_type=value))
    inputs = padded_batch(plain.config, LENGTHS)
    assert set(other.state_dict()) == set(plain.state_dict())
    assert torch.equal(other(**inputs).last_hidden_state, plain(**inputs).last_hidden_state)


@pytest.mark.parametrize(("field", "value"), [("relative_attention_num_buckets", 16), ("pad_token_id", 0)])
def test_values_that_the_code_of_mpnet_does_not_look_at_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}, but the stock model always computes"):
        find_family("mpnet").to_dsx(stock_config("mpnet", "small", **{field: value}))


def test_a_summary_that_is_no_projection_of_the_first_token_is_refused_for_multiple_choice_alone():
    config = stock_config("electra", "small", summary_type="mean")
    find_family("electra").to_dsx(config)
    config.architectures = ["ElectraForMultipleChoice"]
    with pytest.raises(ValueError, match="summary_type='mean'"):
        find_family("electra").to_dsx(config)


def test_an_unknown_family_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'electra'"):
        find_family("elektra")


def test_a_class_without_counterpart_is_refused_with_those_that_have_one():
    with pytest.raises(ValueError, match=r"'BertLMHeadModel' has no DSX counterpart.*BertForMaskedLM"):
        find_family("bert").find_head("BertLMHeadModel")
