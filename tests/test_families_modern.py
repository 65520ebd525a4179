"""NomicBERT, ModernBERT, EuroBERT and UltraBERT against transformers' own classes: outputs, weights there and back.

Every parameter of the stock models is scrambled, so that a forgotten bias or norm shows. Rows are longer than the
window and than `max_position_embeddings`, and of different lengths.
"""

import copy

import pytest
import tiny
import torch
import transformers
from safetensors.torch import save_file
from transformers import EuroBertConfig, ModernBertConfig, NomicBertConfig, UltrabertConfig

import modeling_dsx_encoder
from modeling_dsx_encoder import DsxEncoderConfig
from modeling_dsx_encoder.conversion_models import to_dsx_model, to_stock_model
from modeling_dsx_encoder.families import find_family

NEAR = 1e-5
LENGTHS = (41, 7, 23)
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 24, "num_labels": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 2.5, 3.0],
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


def modern(**fields):
    return ModernBertConfig(**SHAPE, cls_token_id=1, sep_token_id=2, **fields)


def nested(full, sliding):
    return {"full_attention": dict(full), "sliding_attention": dict(sliding)}


# Each its own function: classes of transformers write into the dicts that they are given.
CONFIGS = {
    "nomic-as-released": lambda: NomicBertConfig(**SHAPE, vocab_size=96),
    "nomic-dynamic-untied": lambda: NomicBertConfig(
        **SHAPE, vocab_size=101, rope_parameters=dict(DYNAMIC), tie_word_embeddings=False, hidden_act="gelu",
    ),
    "nomic-linear-one-head": lambda: NomicBertConfig(
        **SHAPE | {"num_attention_heads": 1}, vocab_size=97, type_vocab_size=5, rope_parameters=dict(LINEAR),
        layer_norm_eps=1e-5,
    ),
    "modern-as-released": lambda: modern(vocab_size=96, local_attention=8),
    "modern-biases-mean-untied": lambda: modern(
        vocab_size=101, local_attention=7, attention_bias=True, mlp_bias=True, norm_bias=True, classifier_bias=True,
        classifier_pooling="mean", classifier_activation="silu", hidden_activation="relu", tie_word_embeddings=False,
    ),
    "modern-full-layers-no-decoder-bias": lambda: modern(
        vocab_size=97, layer_types=["full_attention"] * 4, decoder_bias=False, norm_bias=True, norm_eps=1e-6,
    ),
    "modern-yarn-and-dynamic": lambda: modern(
        vocab_size=97, local_attention=6, layer_types=MIXED, rope_parameters=nested(YARN, DYNAMIC),
    ),
    "modern-one-base": lambda: modern(vocab_size=98, local_attention=64, global_rope_theta=1e5, local_rope_theta=1e5),
    "euro-late": lambda: EuroBertConfig(**SHAPE, vocab_size=96, mask_token_id=3, num_key_value_heads=2),
    "euro-bos-biases-tied": lambda: EuroBertConfig(
        **SHAPE, vocab_size=101, mask_token_id=3, num_key_value_heads=1, attention_bias=True, mlp_bias=True,
        classifier_pooling="bos", tie_word_embeddings=True, rope_parameters=dict(LONGROPE), rms_norm_eps=1e-6,
    ),
    "euro-mean-llama3": lambda: EuroBertConfig(
        **SHAPE, vocab_size=97, mask_token_id=3, classifier_pooling="mean", rope_parameters=dict(LLAMA3),
        hidden_act="gelu",
    ),
    "ultra-as-released": lambda: UltrabertConfig(**SHAPE, vocab_size=96, sliding_window=5, prediction_head_size=24),
    "ultra-mean-biases-tied": lambda: UltrabertConfig(
        **SHAPE, vocab_size=101, num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        classifier_pooling="mean", sliding_window=3, layer_types=MIXED, rope_parameters=nested(LINEAR, YARN),
    ),
    "ultra-first-layout": lambda: UltrabertConfig(
        **SHAPE, vocab_size=97, attention_windows=[0, 4, 4, 0], rope_theta=[1e5, 1e3, 1e3, 1e5],
    ),
}  # fmt: skip
RUNS = {
    "eager": {"attention": "eager", "padding_free": False},
    "sdpa": {"attention": "sdpa", "padding_free": False},
    "padding-free": {"attention": "sdpa", "padding_free": True},
}
CASES = [(name, head) for name, config in CONFIGS.items() for head in find_family(config().model_type).heads]
PARTS = ("logits", "start_logits", "end_logits", "last_hidden_state")


def build_stock(family, head, config, attention="sdpa"):
    """A stock model whose every parameter matters; word vectors small enough for logits of about 1."""
    stock = tiny.build(family.stock_class(family.heads[head]), config, attention)
    tables = {stock.get_input_embeddings().weight, getattr(stock.get_output_embeddings(), "weight", None)}
    with torch.no_grad():
        for table in tables - {None}:
            table.mul_(0.2)
    return stock


def stock_model(name, head, attention="sdpa"):
    config = CONFIGS[name]()
    family = find_family(config.model_type)
    return family, build_stock(family, head, config, attention)


def dsx_config(family, stock, **fields):
    return DsxEncoderConfig(**family.to_dsx(stock.config), num_labels=stock.config.num_labels, **fields)


def converted(family, head, stock, attention="sdpa", **fields):
    """The stock model as one of ours, by the maps alone."""
    config = dsx_config(family, stock, **fields)
    model_class = getattr(modeling_dsx_encoder, f"DsxEncoderFor{head}" if head else "DsxEncoderModel")
    ours = model_class._from_config(config, attn_implementation=attention).eval()
    moved = family.key_map(head, family.heads[head], config).to_ours(stock.state_dict(), shapes(ours))
    assert not moved.dropped
    assert moved.differing == unused(stock)
    ours.load_state_dict(moved.state)
    return ours


def unused(stock):
    """The second bias of an untied NomicBERT head, which takes no part in anything."""
    names = [] if stock.config.tie_word_embeddings else ["cls.predictions.bias"]
    return [name for name in names if name in stock.state_dict()]


def shapes(model):
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def batch(stock, head, side="right"):
    """Rows of `LENGTHS` padded on one side; for multiple choice two choices of one text."""
    input_ids, attention_mask = tiny.token_batch(side, LENGTHS, vocab_size=stock.config.vocab_size)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if getattr(stock.config, "type_vocab_size", 0):
        inputs["token_type_ids"] = (input_ids % stock.config.type_vocab_size) * attention_mask
    return {key: tensor[None] for key, tensor in inputs.items()} if head == "MultipleChoice" else inputs


def results(model, inputs, **kwargs):
    """Outputs by name, those of tokens as one row a real token, whatever side the padding is on."""
    with torch.no_grad():
        outputs = model(**inputs, **kwargs)
    real = inputs["attention_mask"].bool().flatten(0, -2)  # (rows, or rows times choices, L)
    found = {key: outputs[key] for key in PARTS if key in outputs}
    found |= {f"hidden state {n}": states for n, states in enumerate(outputs.hidden_states or ())}
    return {key: tensor[real] if tensor.shape[:2] == real.shape else tensor for key, tensor in found.items()}


def largest_difference(wanted, found):
    """The largest difference of outputs, none of which may be missing or trivial."""
    assert {key: tensor.shape for key, tensor in found.items()} == {key: t.shape for key, t in wanted.items()}
    assert all(tensor.std() > 0.01 for tensor in wanted.values())
    return max((found[key] - tensor).abs().max().item() for key, tensor in wanted.items())


@pytest.mark.parametrize(("name", "head"), CASES)
def test_every_output_is_that_of_the_stock_model(name, head):
    family, stock = stock_model(name, head)
    inputs = batch(stock, head)
    wanted = results(stock, inputs, output_hidden_states=True)
    assert len([key for key in wanted if key.startswith("hidden")]) == stock.config.num_hidden_layers + 1
    for run, fields in RUNS.items():
        ours = converted(family, head, stock, **fields)
        assert largest_difference(wanted, results(ours, inputs, output_hidden_states=True)) < NEAR, run
        plain = {key: tensor for key, tensor in wanted.items() if not key.startswith("hidden")}
        assert largest_difference(plain, results(ours, inputs)) < NEAR, run
        # Padding on the left changes nothing: positions are counted from the mask.
        assert largest_difference(plain, results(ours, batch(stock, head, "left"))) < NEAR, f"{run}, left"


@pytest.mark.parametrize(("name", "head"), CASES)
def test_weights_come_back_bit_for_bit_and_the_configuration_with_them(name, head):
    family, stock = stock_model(name, head, attention="eager")
    ours = converted(family, head, stock)
    assert family.differences(ours.config, head) == {}
    config = family.config_class(**family.from_dsx(ours.config), num_labels=ours.config.num_labels)
    back = family.stock_class(family.heads[head])._from_config(config, attn_implementation="eager").eval()
    moved = family.key_map(head, family.heads[head], ours.config).to_stock(ours.state_dict(), shapes(back))
    assert not moved.dropped
    assert list(moved.state) == list(stock.state_dict())
    wanted = {key: tensor for key, tensor in stock.state_dict().items() if key not in unused(stock)}
    assert all(torch.equal(moved.state[key], tensor) for key, tensor in wanted.items())
    back.load_state_dict(moved.state)
    inputs = batch(stock, head)
    assert largest_difference(results(stock, inputs), results(back, inputs)) == 0.0


@pytest.mark.parametrize("family", ["nomic_bert", "modernbert", "eurobert", "ultrabert"])
def test_a_fine_tuned_head_goes_back_to_the_stock_class_with_its_labels(family):
    name = next(name for name, config in CONFIGS.items() if config().model_type == family)
    _, stock = stock_model(name, "TokenClassification")
    stock.config.id2label, stock.config.label2id = {0: "人", 1: "地"}, {"人": 0, "地": 1}
    ours, head, _ = to_dsx_model(stock)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.01)
    back, _, moved = to_stock_model(ours, find_family(family))
    assert (head, type(back), moved.dropped) == ("TokenClassification", type(stock), [])
    assert back.config.id2label == {0: "人", 1: "地"}
    inputs = batch(stock, head)
    assert largest_difference(results(back, inputs), results(ours, inputs)) < NEAR


@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_weights_are_moved_as_they_are(name):
    family, stock = stock_model(name, "")
    state = {key: tensor.bfloat16() for key, tensor in stock.state_dict().items()}
    ours = converted(family, "", stock)
    key_map = family.key_map("", family.heads[""], ours.config)
    there = key_map.to_ours(state, shapes(ours)).state
    assert {tensor.dtype for tensor in there.values()} == {torch.bfloat16}
    back = key_map.to_stock(there, shapes(stock)).state
    assert all(torch.equal(back[key], tensor) for key, tensor in state.items())


def test_nomic_base_1000_gate_and_up_in_order_post_norm_and_scaling_only_past_the_trained_length():
    """Case 16: a stock NomicBERT in its first layout of keys, as the Hub has it, read by transformers and by us."""
    _, stock = stock_model("nomic-as-released", "")
    ours = converted(find_family("nomic_bert"), "", stock)
    assert ours.config.rope_parameters == {"rope_type": "default", "rope_theta": 1000.0}
    assert (ours.config.norm_position, ours.config.gated_mlp, ours.config.type_vocab_size) == ("post", True, 2)
    for number, layer in enumerate(stock.layers):
        assert torch.equal(ours.layers[number].mlp.gate_proj.weight, layer.mlp.gate_proj.weight)
        assert torch.equal(ours.layers[number].mlp.up_proj.weight, layer.mlp.up_proj.weight)

    fields = SHAPE | {"vocab_size": 96, "max_position_embeddings": 24}
    scaled_config = NomicBertConfig(**fields, rope_parameters={**DYNAMIC, "rope_theta": 1000.0})
    scaled = build_stock(find_family("nomic_bert"), "", scaled_config)
    ours_scaled = converted(find_family("nomic_bert"), "", scaled)
    # The stock class falls back to its first frequencies only below the trained length, not at it.
    short = {key: tensor[:, :23] for key, tensor in batch(stock, "").items()}
    past = batch(stock, "")
    unscaled = converted(find_family("nomic_bert"), "", stock)
    assert largest_difference(results(unscaled, short), results(ours_scaled, short)) < NEAR
    assert largest_difference(results(unscaled, past), results(ours_scaled, past)) > 0.01
    for inputs in (short, past, short):  # a long batch leaves nothing behind
        assert largest_difference(results(scaled, inputs), results(ours_scaled, inputs)) < NEAR


def first_layout(stock):
    """The weights of a NomicBERT under the names of its first code: one Wqkv, fc11 and fc12."""
    state = stock.state_dict()
    renamed = {}
    for key, tensor in state.items():
        key = key.replace("self_attn.o_proj", "attn.out_proj").replace("embeddings.LayerNorm", "emb_ln")
        key = key.replace("up_proj", "fc11").replace("gate_proj", "fc12").replace("down_proj", "fc2")
        key = key.replace("post_attention_layernorm", "norm1").replace("post_mlp_layernorm", "norm2")
        renamed[key.replace("layers.", "encoder.layers.")] = tensor
    for number in range(stock.config.num_hidden_layers):
        names = [f"encoder.layers.{number}.self_attn.{which}_proj.weight" for which in "qkv"]
        renamed[f"encoder.layers.{number}.attn.Wqkv.weight"] = torch.cat([renamed.pop(name) for name in names])
    return renamed


def test_nomic_weights_in_their_first_layout_convert_as_transformers_reads_them(tmp_path):
    family, stock = stock_model("nomic-as-released", "")
    stock.config.save_pretrained(tmp_path)
    state = {key: tensor.contiguous().clone() for key, tensor in first_layout(stock).items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = transformers.NomicBertModel.from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == list(stock.state_dict())
    ours = converted(family, "", loaded)
    inputs = batch(stock, "")
    assert largest_difference(results(stock, inputs), results(ours, inputs)) < NEAR


def test_nomic_fields_that_transformers_reads_past_are_refused_when_they_say_otherwise():
    family = find_family("nomic_bert")
    first = {"n_head": 4, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "prenorm": False}
    family.to_dsx(NomicBertConfig(**SHAPE, **first, rotary_scaling_factor=None, rotary_emb_fraction=1.0))
    for wrong in ({"n_head": 2}, {"rotary_emb_base": 10000}, {"prenorm": True}, {"rotary_scaling_factor": 2.0}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name} .* is not read by transformers"):
            family.to_dsx(NomicBertConfig(**SHAPE, **first | wrong))


def test_modernbert_embedding_norm_no_first_attention_norm_half_the_window_and_two_bases():
    """Case 17: window 128 is radius 64, and each kind of layer has its RoPE base; all heads within 1e-5."""
    family = find_family("modernbert")
    config = DsxEncoderConfig(**family.to_dsx(ModernBertConfig()))
    assert (config.embedding_norm, config.first_attention_norm, config.sliding_window) == (True, False, 64)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 160_000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0
    lengths = (150, 40)
    for head in family.heads:
        stock_config = modern(vocab_size=96, local_attention=128)
        stock = build_stock(family, head, stock_config)
        input_ids, attention_mask = tiny.token_batch("right", lengths, vocab_size=96)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if head == "MultipleChoice":
            inputs = {key: tensor[None] for key, tensor in inputs.items()}
        wanted = results(stock, inputs)
        assert largest_difference(wanted, results(converted(family, head, stock), inputs)) < NEAR, head
        wider = copy.deepcopy(stock_config)
        wider.local_attention = 130  # one more on each side is seen
        other = build_stock(family, head, wider)
        if not head:
            assert largest_difference(wanted, results(other, inputs)) > NEAR


@pytest.mark.parametrize("config_class", [NomicBertConfig, EuroBertConfig, UltrabertConfig])
def test_heads_that_are_not_an_equal_share_are_refused_by_name(config_class):
    config = config_class(**SHAPE, head_dim=16)
    with pytest.raises(ValueError, match=r"head_dim \(16\) differs from hidden_size / num_attention_heads = 32 / 4"):
        find_family(config.model_type).to_dsx(config)


def test_an_unknown_pooling_of_eurobert_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"classifier_pooling \('last'\) of EuroBERT must be one of"):
        find_family("eurobert").to_dsx(EuroBertConfig(**SHAPE, classifier_pooling="last"))


@pytest.mark.parametrize(
    ("family", "fields", "in_the_way"),
    [
        ("nomic_bert", {"norm_position": "pre"}, {"norm_position"}),
        ("nomic_bert", {"attention_bias": True, "num_key_value_heads": 2}, {"attention_bias", "num_key_value_heads"}),
        ("modernbert", {"first_attention_norm": True}, {"first_attention_norm"}),
        ("modernbert", {"gated_mlp": False}, {"gated_mlp"}),
        ("eurobert", {"norm_type": "layer_norm"}, {"norm_type"}),
        ("eurobert", {"layer_types": MIXED, "sliding_window": 4}, {"layer_types", "sliding_window"}),
        ("ultrabert", {"num_global_tokens": 1}, {"num_global_tokens"}),
        ("ultrabert", {"type_vocab_size": 2}, {"type_vocab_size"}),
    ],
)
def test_what_a_family_cannot_say_is_named(family, fields, in_the_way):
    name = next(name for name, config in CONFIGS.items() if config().model_type == family)
    found = find_family(family)
    config = DsxEncoderConfig(**found.to_dsx(CONFIGS[name]()) | fields)
    assert set(found.differences(config, "")) == in_the_way


def test_fields_of_other_heads_and_rates_do_not_stand_in_the_way():
    family = find_family("modernbert")
    fields = family.to_dsx(modern(vocab_size=96)) | {"hidden_dropout": 0.2, "classifier_pooling": "max"}
    config = DsxEncoderConfig(**fields)
    assert family.differences(config, "TokenClassification") == {}
    assert set(family.differences(config, "SequenceClassification")) == {"classifier_pooling"}
