"""Positions, masks, windows and back ends, against the hand-written algebra of `reference.py`."""

import itertools
import math

import pytest
import reference
import torch
from accelerate.utils import send_to_device
from tiny import (
    NO_DROPOUT,
    POSITIONS,
    SIDES,
    TRUNK_AND_HEADS,
    WINDOWS,
    build,
    for_head,
    gradients,
    tiny_config,
    token_batch,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from modeling_dsx_encoder import DsxEncoderForSequenceClassification, DsxEncoderForTokenClassification, DsxEncoderModel
from modeling_dsx_encoder import attention_dsx_encoder as attention
from modeling_dsx_encoder.modeling_dsx_encoder import DsxEncoderDropout

BACK_ENDS = ("eager", "sdpa")
STYLES = [
    {"norm_position": place, "norm_type": norm, "gated_mlp": gated, "mlp_bias": not gated, "attention_bias": not gated}
    for place, norm, gated in itertools.product(("pre", "post"), ("layer_norm", "rms_norm"), (True, False))
]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def mask_forms(mask):
    """The same padding mask in every accepted form; integers and floats stand for 0 and 1 in two dimensions."""
    num_rows, width = mask.shape
    seen = mask.bool()
    per_query = seen[:, None, :].expand(num_rows, width, width)
    per_head = per_query[:, None]
    lowest = torch.finfo(torch.float32).min
    return {
        "2-D bool": seen,
        "2-D int8": mask.to(torch.int8),
        "2-D uint8": mask.to(torch.uint8),
        "2-D float": mask.float(),
        "3-D bool": per_query,
        "3-D int": per_query.long(),
        "3-D of real queries": per_query & seen[:, :, None],
        "4-D bool": per_head,
        "4-D int": per_head.int(),
        "4-D bool, a copy a head": per_head.expand(-1, 4, -1, -1),
        "4-D additive": torch.zeros(per_head.shape).masked_fill(~per_head, lowest),
        "4-D additive, infinite": torch.zeros(per_head.shape).masked_fill(~per_head, -math.inf),
        "4-D additive, as the first BERT did": torch.zeros(per_head.shape).masked_fill(~per_head, -10000.0),
        "4-D additive, large": torch.zeros(per_head.shape).masked_fill(~per_head, -1e9),
        "4-D additive, a copy a head": torch.zeros(per_head.shape).masked_fill(~per_head, lowest).repeat(1, 4, 1, 1),
    }


def free_masks(width=9, num_rows=3, num_heads=4):
    """Masks that no padding mask can express; some queries see nothing, yet other queries see those tokens."""
    generator = torch.Generator().manual_seed(11)
    per_query = torch.rand(num_rows, width, width, generator=generator) < 0.6
    per_query[:, 0] = True  # one query that sees all: no token counts as padding
    per_query[1, 4] = False  # and one that sees nothing
    per_head = torch.rand(num_rows, num_heads, width, width, generator=generator) < 0.6
    per_head[:, :, 0] = True
    per_head[2, :, 3] = False
    additive = torch.randn(num_rows, num_heads, width, width, generator=generator)
    additive = additive.masked_fill(~per_head, torch.finfo(torch.float32).min)
    return {"3-D": per_query, "4-D bool": per_head, "4-D additive": additive}


# The parts against the algebra


def test_norms_agree_with_the_reference():
    x = 3.0 * torch.randn(2, 5, 32) + 1.0
    for bias in (True, False):
        model = build(DsxEncoderModel, tiny_config(norm_bias=bias, norm_eps=1e-3))
        norm = model.layers[0].attention_norm
        assert (norm.bias is not None) == bias
        expected = reference.layer_norm(x.double(), norm.weight.double(), norm.bias.double() if bias else None, 1e-3)
        assert_close(norm(x).double(), expected, **CLOSE)
    norm = build(DsxEncoderModel, tiny_config(norm_type="rms_norm", norm_eps=1e-3)).final_norm
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert_close(norm(x).double(), reference.rms_norm(x.double(), norm.weight.double(), 1e-3), **CLOSE)


@pytest.mark.parametrize("act", reference.ACTIVATIONS)
def test_feed_forward_agrees_with_the_reference(act):
    x = torch.randn(2, 5, 32)
    for gated, bias in itertools.product((True, False), (True, False)):
        model = build(DsxEncoderModel, tiny_config(hidden_act=act, gated_mlp=gated, mlp_bias=bias))
        state = {name: value.double() for name, value in model.state_dict().items()}
        assert ("layers.0.mlp.gate_proj.weight" in state) == gated
        assert ("layers.0.mlp.up_proj.bias" in state) == bias
        function = reference.gated_feed_forward if gated else reference.classic_feed_forward
        expected = function(x.double(), state, "layers.0.mlp", reference.ACTIVATIONS[act])
        assert_close(model.layers[0].mlp(x).double(), expected, **CLOSE)
        flat = model.layers[0].mlp(x.flatten(0, 1))  # the leading axes do not matter
        assert_close(flat.view_as(x), model.layers[0].mlp(x), **CLOSE)


@pytest.mark.parametrize("scheme", POSITIONS)
def test_encoder_agrees_with_the_reference(scheme):
    for number, (style, window) in enumerate(itertools.product(STYLES, WINDOWS)):
        config = tiny_config(position_embedding_type=scheme, **style, **WINDOWS[window])
        side, back_end = SIDES[number % 3], BACK_ENDS[number % 2]
        model = build(DsxEncoderModel, config, back_end, seed=number)
        input_ids, mask = token_batch(side)
        with torch.no_grad():
            found = model(input_ids, attention_mask=mask).last_hidden_state
        expected = reference.encode(model, input_ids, mask)
        assert_close(found.double(), expected, **CLOSE, msg=lambda text, at=(style, window, side): f"{at}: {text}")


@pytest.mark.parametrize("scheme", POSITIONS)
def test_encoder_agrees_with_the_reference_on_free_masks(scheme):
    input_ids = token_batch(lengths=(9, 9, 9))[0]
    for back_end, window, (form, mask) in itertools.product(BACK_ENDS, WINDOWS, free_masks().items()):
        model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, **WINDOWS[window]), back_end)
        with torch.no_grad():
            found = model(input_ids, attention_mask=mask).last_hidden_state
        expected = reference.encode(model, input_ids, mask)
        assert_close(found.double(), expected, **CLOSE, msg=lambda text, at=(back_end, window, form): f"{at}: {text}")


@pytest.mark.parametrize(
    "fields",
    [
        {"embedding_norm": True, "type_vocab_size": 2, "position_embedding_type": "learned", "norm_position": "post"},
        {"embedding_norm": True, "type_vocab_size": 3, "position_offset": 2, "position_embedding_type": "learned"},
        {"position_offset": 3, "position_embedding_type": "sinusoidal", "scale_embeddings": False},
        {"scale_embeddings": True, "position_embedding_type": "rope", "num_key_value_heads": 1},
        {"num_attention_heads": 1, "position_embedding_type": "alibi"},
        {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "position_embedding_type": "alibi"},
        {"hidden_size": 33, "num_attention_heads": 3, "position_embedding_type": "sinusoidal"},
        {"position_embedding_type": "relative_bias", "relative_attention_num_buckets": 8},
        {"norm_bias": False, "norm_position": "post", "num_hidden_layers": 3},
        {"embedding_size": 20, "embedding_norm": True, "position_embedding_type": "learned", "type_vocab_size": 2},
        {"embedding_size": 44, "position_embedding_type": "sinusoidal"},
        {"first_attention_norm": False, "embedding_norm": True, "position_embedding_type": "rope"},
        {"position_embedding_type": "rope", "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_other_fields_agree_with_the_reference(fields):
    config = tiny_config(**fields)
    model = build(DsxEncoderModel, config)
    input_ids, mask = token_batch("left")
    types = (input_ids + torch.arange(9)) % config.type_vocab_size if config.type_vocab_size else None
    with torch.no_grad():
        found = model(input_ids, attention_mask=mask, token_type_ids=types).last_hidden_state
    assert_close(found.double(), reference.encode(model, input_ids, mask, types), **CLOSE)


def test_missing_token_types_are_zero():
    model = build(DsxEncoderModel, tiny_config(type_vocab_size=2))
    input_ids, mask = token_batch()
    zeros = torch.zeros_like(input_ids)
    with torch.no_grad():
        absent = model(input_ids, attention_mask=mask).last_hidden_state
        assert_close(model(input_ids, attention_mask=mask, token_type_ids=zeros).last_hidden_state, absent)


# Position schemes


@pytest.mark.parametrize("width", [32, 33, 1])
def test_sinusoidal_table_equals_its_formula(width):
    heads = 4 if width == 32 else 1
    config = tiny_config(hidden_size=width, num_attention_heads=heads, max_position_embeddings=40, position_offset=2)
    table = DsxEncoderModel(config).positions.table
    assert table.shape == (42, width)
    assert table.dtype == torch.float32
    assert_close(table.double(), reference.sinusoid(42, width), atol=1e-5, rtol=0)


def test_long_sinusoidal_table_is_exact():
    table = DsxEncoderModel(tiny_config(max_position_embeddings=4096)).positions.table
    angle = torch.arange(4096, dtype=torch.float64)[:, None] / 10000.0 ** (
        torch.arange(0, 32, 2, dtype=torch.float64) / 32
    )
    assert_close(table[:, 0::2].double(), torch.sin(angle), atol=1e-5, rtol=0)
    assert_close(table[:, 1::2].double(), torch.cos(angle), atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_heads", [1, 2, 4, 6, 8, 12, 16, 20])
def test_alibi_slopes_equal_their_formula(num_heads):
    config = tiny_config(hidden_size=240 if 240 % num_heads == 0 else 16 * num_heads, num_attention_heads=num_heads)
    config = tiny_config(
        position_embedding_type="alibi", hidden_size=config.hidden_size, num_attention_heads=num_heads
    )
    slopes = DsxEncoderModel(config).positions.slopes
    assert_close(slopes.double().flatten(), reference.alibi_slopes(num_heads), atol=1e-7, rtol=1e-6)


def test_relative_buckets_equal_their_formula_at_every_distance():
    """A one-layer trunk whose bias table holds the bucket's number shows the bucket in its attention weights."""
    for buckets, furthest in ((32, 128), (16, 20)):
        config = tiny_config(
            num_hidden_layers=1,
            num_attention_heads=1,
            position_embedding_type="relative_bias",
            relative_attention_num_buckets=buckets,
            relative_attention_max_distance=furthest,
            max_position_embeddings=16,  # no limit for this scheme
        )
        model = build(DsxEncoderModel, config)
        with torch.no_grad():
            model.layers[0].attention.qkv_proj.weight.zero_()
            model.positions.relative_attention_bias.weight.copy_(0.1 * torch.arange(buckets)[:, None])
            weights = model(torch.full((1, 150), 7), output_attentions=True).attentions[0][0, 0]
        bias = torch.tensor(
            [[0.1 * reference.t5_bucket(j - i, buckets, furthest) for j in range(150)] for i in range(150)]
        )
        assert_close(weights, torch.softmax(bias, dim=-1), atol=1e-6, rtol=1e-4)


def test_word_embeddings_are_scaled_where_asked():
    for scheme, asked, scaled in [
        ("sinusoidal", None, True),
        ("sinusoidal", False, False),
        ("rope", None, False),
        ("learned", None, False),
        ("learned", True, True),
    ]:
        config = tiny_config(position_embedding_type=scheme, scale_embeddings=asked, norm_position="post")
        model = build(DsxEncoderModel, config)
        input_ids = token_batch(lengths=(5,))[0]
        with torch.no_grad():
            first = model(input_ids, output_hidden_states=True).hidden_states[0]
            added = 0.0
            if scheme == "sinusoidal":
                added = model.positions.table[:5]
            elif scheme == "learned":
                added = model.positions.table.weight[:5]
            expected = model.embeddings.word_embeddings(input_ids) * (32**0.5 if scaled else 1.0) + added
        assert_close(first, expected, **CLOSE)


@pytest.mark.parametrize("scheme", POSITIONS)
def test_position_ids_that_count_from_zero_change_nothing(scheme):
    model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, position_offset=2))
    input_ids = token_batch(lengths=(9, 9))[0]
    with torch.no_grad():
        counted = model(input_ids).last_hidden_state
        given = model(input_ids, position_ids=torch.arange(9).expand(2, 9)).last_hidden_state
        one_row = model(input_ids, position_ids=torch.arange(9)[None]).last_hidden_state
    assert_close(given, counted, **CLOSE)
    assert_close(one_row, counted, **CLOSE)


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "rope"])
def test_position_ids_of_the_caller_are_used(scheme):
    model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme))
    input_ids = token_batch(lengths=(9,))[0]
    with torch.no_grad():
        counted = model(input_ids).last_hidden_state
        spread = model(input_ids, position_ids=3 * torch.arange(9)[None]).last_hidden_state
    assert not torch.allclose(counted, spread, atol=1e-3)


def rope_cos_sin(rotary, positions, dtype=torch.float32, layer_type=None):
    """Call the rotary module as transformers does: `(x, position_ids[, layer_type])` gives cosines and sines."""
    more = {} if layer_type is None else {"layer_type": layer_type}
    return rotary(torch.zeros(1, dtype=dtype), positions[None], **more)


@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16, torch.float16])
def test_rope_keeps_its_precision_at_far_positions(cast):
    """Case 15: stock encoders are off by 0.39 at position 8191 after `.to(torch.bfloat16)`."""
    config = tiny_config(position_embedding_type="rope", hidden_size=64, max_position_embeddings=8192)
    model = DsxEncoderModel(config).to(cast)
    far = torch.tensor([0, 1, 4095, 8191])
    frequencies = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angle = torch.cat([far[:, None] * frequencies] * 2, dim=-1)
    cos, sin = rope_cos_sin(model.positions.rotary_emb, far, cast)
    assert_close(cos[0].double(), torch.cos(angle), atol=5e-3, rtol=0)
    assert_close(sin[0].double(), torch.sin(angle), atol=5e-3, rtol=0)
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            assert buffer.dtype == torch.float32, name
            assert_close(buffer.double(), frequencies, atol=0, rtol=1e-6)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "to(float16)"])
def test_tables_stay_exact_under_a_cast(cast):
    for scheme in ("sinusoidal", "alibi"):
        model = DsxEncoderModel(tiny_config(position_embedding_type=scheme))
        model = {"bfloat16": model.bfloat16, "half": model.half, "to(float16)": lambda m=model: m.to(torch.float16)}[
            cast
        ]()
        if scheme == "sinusoidal":
            assert model.positions.table.dtype == torch.float32
            assert_close(model.positions.table.double(), reference.sinusoid(64, 32), atol=1e-6, rtol=0)
        else:
            assert model.positions.slopes.dtype == torch.float32
            assert_close(model.positions.slopes.double().flatten(), reference.alibi_slopes(4), atol=1e-7, rtol=0)
        output = model(token_batch()[0]).last_hidden_state
        assert output.dtype == (torch.bfloat16 if cast == "bfloat16" else torch.float16)


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("by_type", [False, True])
@pytest.mark.parametrize("kind", [*SCALINGS, "proportional"])
def test_scaled_rotations_survive_saving(kind, by_type, tmp_path):
    """Models are loaded on the meta device, where transformers' own tables would hold nothing."""
    scaled = {**SCALINGS.get(kind, {"rope_type": kind, "factor": 2.0}), "rope_theta": 10000.0}
    rope = {"full_attention": scaled, "sliding_attention": scaled | {"rope_theta": 100.0}} if by_type else scaled
    config = tiny_config(position_embedding_type="rope", rope_parameters=rope, max_position_embeddings=16)
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], 4
    model = build(DsxEncoderModel, config)
    model.save_pretrained(tmp_path)
    input_ids = token_batch(lengths=(40,))[0]
    for dtype in (torch.float32, torch.bfloat16):
        loaded = DsxEncoderModel.from_pretrained(tmp_path, dtype=dtype)
        tables = dict(model.named_buffers())
        assert tables
        for name, table in loaded.named_buffers():
            assert torch.equal(table, tables[name]), name
    loaded = DsxEncoderModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert_close(loaded(input_ids).last_hidden_state, model(input_ids).last_hidden_state, **CLOSE)


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling_runs_and_matters(kind):
    scaled = {**SCALINGS[kind], "rope_theta": 10000.0}
    outputs = []
    input_ids = token_batch(lengths=(40,))[0]
    for parameters in ({"rope_type": "default", "rope_theta": 10000.0}, scaled):
        config = tiny_config(
            position_embedding_type="rope", rope_parameters=dict(parameters), max_position_embeddings=16
        )
        model = build(DsxEncoderModel, config)
        with torch.no_grad():
            short = model(input_ids[:, :8]).last_hidden_state
            long = model(input_ids).last_hidden_state
            again = model(input_ids[:, :8]).last_hidden_state
        assert torch.isfinite(long).all()
        assert_close(again, short, **CLOSE)  # a long input leaves nothing behind
        outputs.append((short, long))
    (short, long), (scaled_short, scaled_long) = outputs
    assert not torch.allclose(long, scaled_long, atol=1e-4)
    assert torch.allclose(short, scaled_short, atol=1e-5) == (kind == "dynamic")


def test_two_rope_bases_one_a_layer_type():
    bases = {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    config = tiny_config(position_embedding_type="rope", rope_parameters=bases, **WINDOWS["sliding"])
    model = build(DsxEncoderModel, config)
    input_ids, mask = token_batch("left")
    with torch.no_grad():
        found = model(input_ids, attention_mask=mask).last_hidden_state
    assert_close(found.double(), reference.encode(model, input_ids, mask), **CLOSE)


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
def test_a_sequence_longer_than_the_table_is_refused(scheme):
    for back_end in BACK_ENDS:
        config = tiny_config(position_embedding_type=scheme, max_position_embeddings=8, position_offset=2)
        model = build(DsxEncoderModel, config, back_end)
        model(torch.full((1, 8), 7))
        with pytest.raises(ValueError, match=r"(?s)9.*max_position_embeddings.*8|max_position_embeddings.*8.*9"):
            model(torch.full((1, 9), 7))
        with pytest.raises(ValueError, match=r"(?s)max_position_embeddings"):
            model(inputs_embeds=torch.zeros(1, 9, 32))
        with pytest.raises(ValueError, match=r"(?s)max_position_embeddings"):
            model(torch.full((1, 2), 7), position_ids=torch.tensor([[0, 8]]))


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
def test_padding_past_the_table_is_no_longer_sequence(scheme):
    model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, max_position_embeddings=8))
    for side in SIDES:
        input_ids, mask = token_batch(side, lengths=(4, 8))
        input_ids, mask = (torch.nn.functional.pad(t, (2, 0) if side == "left" else (0, 2)) for t in (input_ids, mask))
        with torch.no_grad():
            found = model(input_ids, attention_mask=mask).last_hidden_state
        assert_close(found.double(), reference.encode(model, input_ids, mask), **CLOSE)


@pytest.mark.parametrize("scheme", ["rope", "relative_bias", "alibi", "none"])
def test_other_schemes_go_on_past_the_trained_length(scheme):
    model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, max_position_embeddings=8))
    input_ids = token_batch(lengths=(20,))[0]
    with torch.no_grad():
        found = model(input_ids).last_hidden_state
    assert_close(found.double(), reference.encode(model, input_ids), **CLOSE)


def test_schemes_know_the_order_of_words_and_none_does_not():
    input_ids = token_batch(lengths=(9,))[0]
    for scheme in POSITIONS:
        model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme))
        with torch.no_grad():
            forwards = model(input_ids).last_hidden_state
            backwards = model(input_ids.flip(1)).last_hidden_state.flip(1)
        assert torch.allclose(forwards, backwards, atol=1e-5) == (scheme in ("none", "alibi"))
        swapped = input_ids.clone()
        swapped[0, [1, 5]] = input_ids[0, [5, 1]]
        with torch.no_grad():
            other = model(swapped).last_hidden_state[0, 0]
        assert torch.allclose(forwards[0, 0], other, atol=1e-5) == (scheme == "none")


# Masks


@pytest.mark.parametrize("scheme", POSITIONS)
def test_mask_forms_agree(scheme):
    for window, side, back_end in itertools.product(("full", "sliding"), SIDES, BACK_ENDS):
        model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, **WINDOWS[window]), back_end)
        input_ids, mask = token_batch(side)
        with torch.no_grad():
            plain = model(input_ids, attention_mask=mask).last_hidden_state
            assert plain[mask == 0].abs().max() == 0.0
            for form, other in mask_forms(mask).items():
                found = model(input_ids, attention_mask=other).last_hidden_state
                where = (window, side, back_end, form)
                assert_close(found, plain, **CLOSE, msg=lambda text, where=where: f"{where}: {text}")


@pytest.mark.parametrize("scheme", POSITIONS)
def test_all_ones_and_no_mask_agree(scheme):
    for window in WINDOWS:
        model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, **WINDOWS[window]))
        input_ids, mask = token_batch(lengths=(9, 9))
        with torch.no_grad():
            plain = model(input_ids).last_hidden_state
            for form, other in mask_forms(mask).items():
                found = model(input_ids, attention_mask=other).last_hidden_state
                assert_close(found, plain, **CLOSE, msg=lambda text, form=form: f"{form}: {text}")


WRONG_MASKS = {
    "one column short": (torch.ones(3, 8), r"(?s)attention_mask.*3, 8"),
    "other batch": (torch.ones(2, 9), r"(?s)attention_mask.*2, 9"),
    "1-D": (torch.ones(9), r"(?s)attention_mask.*9"),
    "3-D not square": (torch.ones(3, 9, 8, dtype=torch.bool), r"(?s)attention_mask.*3, 9, 8"),
    "2-D additive": (torch.full((3, 9), -1.0e9), r"(?s)attention_mask.*two axes.*-1"),
    "3-D float": (torch.zeros(3, 9, 9), r"(?s)attention_mask.*(float|4-D|additive)"),
    "4-D other heads": (torch.ones(3, 2, 9, 9, dtype=torch.bool), r"(?s)attention_mask.*3, 2, 9, 9"),
    "4-D one query": (torch.ones(3, 1, 1, 9, dtype=torch.bool), r"(?s)attention_mask.*3, 1, 1, 9"),
    "5-D": (torch.ones(3, 1, 1, 9, 9, dtype=torch.bool), r"(?s)attention_mask.*3, 1, 1, 9, 9"),
}


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_wrong_masks_are_refused(name):
    mask, message = WRONG_MASKS[name]
    model = build(DsxEncoderModel, tiny_config())
    with pytest.raises((ValueError, TypeError), match=message):
        model(token_batch()[0], attention_mask=mask)


def test_other_wrong_inputs_are_refused():
    model = build(DsxEncoderModel, tiny_config(type_vocab_size=2))
    input_ids = token_batch()[0]
    with pytest.raises(TypeError, match=r"(?s)attention_mask.*list"):
        model(input_ids, attention_mask=[[1] * 9] * 3)
    for empty in (input_ids[:0], input_ids[:, :0]):
        with pytest.raises(ValueError, match=r"(?s)batch . and length ., but both must be at least 1"):
            model(empty)
    with pytest.raises(ValueError, match=r"(?s)position_ids.*3, 8.*3, 9"):
        model(input_ids, position_ids=torch.zeros(3, 8, dtype=torch.long))
    with pytest.raises(ValueError, match=r"(?s)input_ids.*\(9,\).*batch"):
        model(input_ids[0])
    with pytest.raises(ValueError, match=r"(?s)inputs_embeds.*\(9, 32\).*batch"):
        model(inputs_embeds=torch.zeros(9, 32))
    with pytest.raises(ValueError, match=r"(?s)input_ids.*vocab_size.*98.*120"):
        model(input_ids + 120 - input_ids.max())
    with pytest.raises(ValueError, match=r"(?s)token_type_ids.*type_vocab_size.*1.*2"):
        model(input_ids, token_type_ids=torch.full_like(input_ids, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_fully_masked_rows_are_finite_zeros(back_end, dtype):
    input_ids, mask = token_batch()
    mask[1] = 0
    for scheme, window in itertools.product(POSITIONS, WINDOWS):
        config = tiny_config(position_embedding_type=scheme, embedding_norm=True, **WINDOWS[window])
        model = build(DsxEncoderModel, config, back_end).to(dtype).train()
        forms = mask_forms(mask)
        for form in ("2-D bool", "3-D int", "4-D bool", "4-D additive"):
            other = forms[form].to(dtype) if form == "4-D additive" else forms[form]
            if form == "4-D additive":
                other = other.clamp(min=torch.finfo(dtype).min)
            model.zero_grad()
            output = model(input_ids, attention_mask=other).last_hidden_state
            output.float().square().mean().backward()
            where = (scheme, window, form)
            assert torch.isfinite(output).all(), where
            assert output[1].abs().max() == 0, where
            assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values()), where


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_batch_with_nothing_visible_is_zero(back_end):
    for name, model_class in TRUNK_AND_HEADS.items():
        model = build(model_class, tiny_config(), back_end)
        input_ids, mask = token_batch()
        output = model(**for_head(name, input_ids, torch.zeros_like(mask)))
        assert torch.isfinite(output[0]).all(), name


@pytest.mark.parametrize("scheme", POSITIONS)
def test_each_row_equals_the_row_alone(scheme):
    for window, side, back_end in itertools.product(WINDOWS, SIDES, BACK_ENDS):
        model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, **WINDOWS[window]), back_end)
        input_ids, mask = token_batch(side)
        with torch.no_grad():
            together = model(input_ids, attention_mask=mask).last_hidden_state
            for row in range(len(mask)):
                alone = model(input_ids[row][mask[row].bool()][None]).last_hidden_state[0]
                where = (window, side, back_end, row)
                found = together[row][mask[row].bool()]
                assert_close(found, alone, **CLOSE, msg=lambda text, where=where: f"{where}: {text}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scheme", POSITIONS)
def test_training_next_to_a_short_row_stays_finite(scheme, precision):
    """Case 3: lengths 3 and 40, window 4, twenty steps; no NaN from the first padded row."""
    config = tiny_config(
        position_embedding_type=scheme, layer_types=["full_attention", "sliding_attention"], sliding_window=4
    )
    input_ids, mask = token_batch(lengths=(3, 40))
    if POSITIONS.index(scheme) % 2:
        model, labels = DsxEncoderForSequenceClassification(config).train(), torch.tensor([0, 1])
    else:
        model, labels = DsxEncoderForTokenClassification(config).train(), (input_ids % 3).masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        assert torch.isfinite(loss), step
        assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values()), step
        optimizer.step()
    model.eval()
    with torch.no_grad():
        together = model.model(input_ids, attention_mask=mask).last_hidden_state
        alone = model.model(input_ids[:1, :3]).last_hidden_state
    assert_close(together[:1, :3], alone, **CLOSE)


# Windows


def receptive_field(model, width, mask=None):
    """Which inputs move which outputs, by the gradient: (L, L) booleans, [i, j] is true where i sees j."""
    embeds = torch.randn(1, width, model.config.hidden_size, requires_grad=True)
    output = model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state[0]
    probe = torch.randn(model.config.hidden_size)
    rows = [torch.autograd.grad((row * probe).sum(), embeds, retain_graph=True)[0][0] for row in output]
    return torch.stack([row.abs().sum(dim=-1) > 0 for row in rows])


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("radius", [1, 2, 5, 11, 30])
def test_window_edges(radius, back_end):
    """Case 9: i sees j iff |i - j| <= radius, on both sides; also next to padding and with the weights asked for."""
    width = 12
    distance = (torch.arange(width)[:, None] - torch.arange(width)).abs()
    for scheme in ("none", "rope", "relative_bias"):
        config = tiny_config(
            num_hidden_layers=1,
            position_embedding_type=scheme,
            layer_types=["sliding_attention"],
            sliding_window=radius,
            embedding_norm=False,
        )
        model = build(DsxEncoderModel, config, back_end)
        assert torch.equal(receptive_field(model, width), distance <= radius)
        mask = torch.ones(1, width, dtype=torch.long)
        mask[0, -4:] = 0
        expected = (distance <= radius) & mask.bool() & mask.bool().T
        assert torch.equal(receptive_field(model, width, mask), expected)
        square = mask[:, None, :].expand(1, width, width).bool()
        assert torch.equal(receptive_field(model, width, square), expected)  # a window survives a 3-D mask
        assert torch.equal(receptive_field(model, width, square[:, None]), expected)  # and a 4-D one
        with torch.no_grad():
            weights = model(torch.full((1, width), 7), output_attentions=True).attentions[0]
        assert torch.equal((weights > 0).all(dim=1)[0], distance <= radius)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_global_tokens_see_and_are_seen(back_end):
    width = 12
    for num_global, side in itertools.product((1, 2), ("right", "left")):
        config = tiny_config(
            num_hidden_layers=1,
            position_embedding_type="none",
            layer_types=["sliding_attention"],
            sliding_window=1,
            num_global_tokens=num_global,
        )
        model = build(DsxEncoderModel, config, back_end)
        mask = torch.ones(1, width, dtype=torch.long)
        mask[0, slice(9, None) if side == "right" else slice(0, 3)] = 0
        real = mask[0].bool()
        positions = mask[0].cumsum(0) - 1
        is_global = real & (positions < num_global)
        near = (positions[:, None] - positions).abs() <= 1
        expected = (near | is_global[:, None] | is_global) & real[:, None] & real
        assert torch.equal(receptive_field(model, width, mask), expected)


@pytest.mark.parametrize("scheme", POSITIONS)
def test_a_window_as_wide_as_the_sequence_is_full_attention(scheme):
    for back_end, side, radius in itertools.product(BACK_ENDS, SIDES, (8, 9, 1000)):
        full = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme), back_end)
        kinds = {"layer_types": ["sliding_attention"] * 2, "sliding_window": radius}
        wide = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, **kinds), back_end)
        wide.load_state_dict(full.state_dict())
        input_ids, mask = token_batch(side)
        with torch.no_grad():
            expected = full(input_ids, attention_mask=mask).last_hidden_state
            assert_close(wide(input_ids, attention_mask=mask).last_hidden_state, expected, **CLOSE)


# Back ends


def test_bare_model_takes_sdpa():
    assert DsxEncoderModel(tiny_config()).config._attn_implementation == "sdpa"


def all_masks():
    """Padding of every side in every number of axes, and masks that are no padding: (ids, mask) by name."""
    cases = {}
    for side in SIDES:
        input_ids, mask = token_batch(side)
        forms = mask_forms(mask)
        cases |= {
            f"{side} {form}": (input_ids, forms[form]) for form in ("2-D bool", "3-D bool", "4-D bool", "4-D additive")
        }
    input_ids = token_batch(lengths=(9, 9, 9))[0]
    return cases | {f"free {form}": (input_ids, mask) for form, mask in free_masks().items()}


def back_ends_agree(scheme, every):
    """Norms x feed-forward x windows, each on one in `every` of the masks, the next ones for the next point."""
    masks = list(all_masks().items())
    for number, (style, window) in enumerate(itertools.product(STYLES, WINDOWS)):
        config = tiny_config(position_embedding_type=scheme, **style, **WINDOWS[window])
        pair = [build(DsxEncoderModel, config, back_end) for back_end in BACK_ENDS]
        for turn, (label, (input_ids, mask)) in enumerate(masks[number % every :: every]):
            compare(pair, input_ids, mask, turn == 0, (style, window, label))


@pytest.mark.parametrize("scheme", POSITIONS)
def test_eager_equals_sdpa(scheme):
    """Outputs and gradients; 7 does not divide 24 or 15, so each mask meets each norm, feed-forward and window."""
    back_ends_agree(scheme, every=7)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", POSITIONS)
def test_eager_equals_sdpa_on_the_whole_grid(scheme):
    back_ends_agree(scheme, every=1)


def compare(pair, input_ids, mask, with_gradients, where):
    """Assert that two models agree on the output, and on all gradients of a fixed linear probe of it."""
    with torch.set_grad_enabled(with_gradients):
        outputs = [model(input_ids, attention_mask=mask).last_hidden_state for model in pair]
    assert_close(outputs[0], outputs[1], **CLOSE, msg=lambda text: f"{where}: {text}")
    if not with_gradients:
        return
    probe = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1)) / outputs[0].numel() ** 0.5
    for model, output in zip(pair, outputs, strict=True):
        model.zero_grad()
        (output * probe).sum().backward()
    first, second = (gradients(model) for model in pair)
    for name in first:
        assert_close(
            first[name], second[name], atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{where} {name}: {text}"
        )


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_grouped_queries_equal_repeated_heads(back_end):
    grouped = build(DsxEncoderModel, tiny_config(num_key_value_heads=2, attention_bias=True), back_end)
    plain = build(DsxEncoderModel, tiny_config(attention_bias=True), back_end)
    state = grouped.state_dict()
    for name in [name for name in state if "qkv_proj" in name]:
        query, key, value = state[name].split([32, 16, 16])
        repeat = [part.view(2, 8, -1).repeat_interleave(2, dim=0).reshape(32, -1) for part in (key, value)]
        state[name] = torch.cat([query.view(32, -1), *repeat]).view(96, *state[name].shape[1:])
    plain.load_state_dict(state)
    for side in SIDES:
        input_ids, mask = token_batch(side)
        with torch.no_grad():
            expected = plain(input_ids, attention_mask=mask).last_hidden_state
            assert_close(grouped(input_ids, attention_mask=mask).last_hidden_state, expected, **CLOSE)
            weights = grouped(input_ids, attention_mask=mask, output_attentions=True).attentions[0]
        assert weights.shape == (3, 4, 9, 9)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_attention_weights_are_real(back_end):
    """Rows sum to 1 over visible keys, whatever the back end, for the trunk and every head."""
    for name, model_class in TRUNK_AND_HEADS.items():
        for scheme, window in (("sinusoidal", "full"), ("relative_bias", "sliding"), ("alibi", "global")):
            model = build(model_class, tiny_config(position_embedding_type=scheme, **WINDOWS[window]), back_end)
            input_ids, mask = token_batch("left")
            inputs = for_head(name, input_ids, mask)
            with torch.no_grad():
                plain = model(**inputs)
                found = model(**inputs, output_attentions=True)
            seen = inputs["attention_mask"].flatten(0, -2).bool()
            assert_close(found[0], plain[0], **CLOSE)
            assert len(found.attentions) == 2
            for weights in found.attentions:
                assert weights.shape == (len(seen), 4, 9, 9)
                sums = weights.sum(dim=-1).transpose(1, 2)[seen]
                assert_close(sums, torch.ones_like(sums), **CLOSE)
                hidden_keys = weights.masked_select(~seen[:, None, None, :])
                assert hidden_keys.abs().max() == 0


def test_attention_weights_of_the_back_ends_agree():
    for scheme in POSITIONS:
        pair = [build(DsxEncoderModel, tiny_config(position_embedding_type=scheme), end) for end in BACK_ENDS]
        input_ids, mask = token_batch("holes")
        with torch.no_grad():
            eager, sdpa = (m(input_ids, attention_mask=mask, output_attentions=True).attentions for m in pair)
        for first, second in zip(eager, sdpa, strict=True):
            assert_close(first, second, **CLOSE)


def test_attention_weights_may_be_asked_for_in_the_configuration():
    model = build(DsxEncoderModel, tiny_config(output_attentions=True))
    assert model(token_batch()[0]).attentions[0].shape == (3, 4, 9, 9)
    model = build(DsxEncoderModel, tiny_config())
    assert model(token_batch()[0]).attentions is None


def test_set_attn_implementation_switches(recwarn):
    model = build(DsxEncoderModel, tiny_config(), "sdpa")
    input_ids, mask = token_batch("left")
    with torch.no_grad():
        expected = model(input_ids, attention_mask=mask).last_hidden_state
        model.set_attn_implementation("eager")
        assert model.config._attn_implementation == "eager"
        assert_close(model(input_ids, attention_mask=mask).last_hidden_state, expected, **CLOSE)


@pytest.fixture
def library_back_end():
    """SDPA under another name: a back end that transformers, not the layout, makes the masks for."""
    AttentionInterface.register("dsx_test", sdpa_attention_forward)
    AttentionMaskInterface.register("dsx_test", sdpa_mask)
    return "dsx_test"


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "rope", "none"])
def test_a_registered_back_end_gives_the_same(scheme, library_back_end):
    for window, side in itertools.product(("full", "sliding"), ("right", "left", None)):
        config = tiny_config(position_embedding_type=scheme, **WINDOWS[window])
        input_ids, mask = token_batch(side or "right")
        mask = mask if side else None
        with torch.no_grad():
            outputs = [
                build(DsxEncoderModel, config, back_end)(input_ids, attention_mask=mask).last_hidden_state
                for back_end in ("sdpa", library_back_end)
            ]
        assert_close(outputs[1], outputs[0], **CLOSE)


@pytest.mark.parametrize(
    ("fields", "inputs", "message"),
    [
        ({"position_embedding_type": "alibi"}, {}, "position_embedding_type='alibi'"),
        ({"position_embedding_type": "relative_bias"}, {}, "position_embedding_type='relative_bias'"),
        ({}, {"attention_mask": torch.ones(3, 9, 9, dtype=torch.bool)}, "attention_mask"),
        ({}, {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}, "packed rows"),
        (WINDOWS["global"], {}, "num_global_tokens=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_registered_back_end_cannot_do_is_refused(fields, inputs, message, library_back_end):
    model = build(DsxEncoderModel, tiny_config(padding_free=False, **fields), library_back_end)
    with pytest.raises(ValueError, match=rf"(?s){message}.*dsx_test.*sdpa"):
        model(token_batch(lengths=(9, 9, 9))[0], **inputs)


# No work on padding


@pytest.mark.parametrize("scheme", POSITIONS)
def test_padding_free_equals_padded(scheme):
    """Outputs and gradients, every side and window, on both back ends."""
    for window, side, back_end in itertools.product(WINDOWS, SIDES, BACK_ENDS):
        fields = {"position_embedding_type": scheme, **WINDOWS[window]}
        pair = [build(DsxEncoderModel, tiny_config(padding_free=free, **fields), back_end) for free in (True, False)]
        compare(pair, *token_batch(side), True, (window, side, back_end))


@pytest.mark.parametrize("free", [True, False])
def test_a_layout_moves_whole_to_another_device(free):
    """A model spread over several devices hands the layout on through accelerate's hooks."""
    model = build(DsxEncoderModel, tiny_config(padding_free=free, position_embedding_type="rope"))
    input_ids, mask = token_batch()
    layout = model.layout(input_ids, mask)
    layout.prepare(model.positions, torch.zeros(20 if free else 3, *() if free else (9,), 32))
    moved = send_to_device(layout, "meta")
    assert type(moved) is type(layout)
    assert moved.config is model.config
    tensors = [moved.ranks, moved.position_ids, moved.mask.tokens, *moved.rotations["full_attention"]]
    assert {tensor.device.type for tensor in tensors + ([moved.indices] if free else [])} == {"meta"}
    assert layout.ranks.device.type == "cpu"


def test_padding_free_does_no_work_on_padding():
    seen = []
    for free, mask_needed in ((True, True), (False, True), (True, False)):
        model = build(DsxEncoderModel, tiny_config(padding_free=free))
        model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
        input_ids, mask = token_batch("left")
        model(input_ids, attention_mask=mask if mask_needed else None)
    assert seen == [(20, 32), (3, 9, 32), (3, 9, 32)]


LONG = (60, 60, 43, 41, 40, 39, 3)  # around the length from which a radius of 3 goes in blocks


@pytest.mark.parametrize("scheme", POSITIONS)
def test_blocked_local_attention_equals_the_full_mask(scheme, monkeypatch):
    """Outputs and gradients over long rows, grouped queries and global tokens, on both back ends."""
    monkeypatch.setattr(attention, "block_size", lambda config: 14)  # blocks from 40 tokens on, not from hundreds
    for back_end, num_global in (("sdpa", 0), ("sdpa", 2), ("eager", 1)):
        fields = {"position_embedding_type": scheme, "num_key_value_heads": 2, "num_global_tokens": num_global}
        fields |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
        pair = [build(DsxEncoderModel, tiny_config(padding_free=free, **fields), back_end) for free in (True, False)]
        compare(pair, *token_batch(lengths=LONG), True, (back_end, num_global))


def test_blocked_local_attention_builds_no_full_mask(monkeypatch):
    fields = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "max_position_embeddings": 4096}
    model = build(DsxEncoderModel, tiny_config(**fields))
    sizes = []
    additive_mask = attention.additive_mask
    monkeypatch.setattr(attention, "additive_mask", lambda *inputs: sizes.append(additive_mask(*inputs)) or sizes[-1])
    for length in (1024, 2048):
        model(token_batch(lengths=(length,))[0])
    sizes = [mask.numel() for mask in sizes if mask is not None]
    assert 0 < sum(sizes) <= (1024 + 2048) * (64 + 2 * 4)


@pytest.mark.parametrize("scheme", ["alibi", "relative_bias", "rope"])
def test_positions_of_the_caller_are_used_in_packed_rows(scheme):
    """Positions that do more than count give the same with and without the flat layout, whatever their dtype."""
    input_ids = token_batch()[0][:1]
    numbers = [[0, 2, 4, 5, 9, 0, 1, 5, 6]]
    fields = {"position_embedding_type": scheme}
    flat, padded = (build(DsxEncoderModel, tiny_config(padding_free=free, **fields)) for free in (True, False))
    expected = padded(input_ids, position_ids=torch.tensor(numbers)).last_hidden_state
    for dtype in (torch.int64, torch.int32, torch.uint8):
        found = flat(input_ids, position_ids=torch.tensor(numbers, dtype=dtype)).last_hidden_state
        assert_close(found, expected, **CLOSE)


def test_hidden_first_tokens_move_the_rank_of_the_packed_sequence():
    fields = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 1, "num_global_tokens": 1}
    input_ids = token_batch()[0][:1]
    mask = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1, 1]])
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    flat, padded = (build(DsxEncoderModel, tiny_config(padding_free=free, **fields)) for free in (True, False))
    found, expected = (
        model(input_ids, attention_mask=mask, cu_seq_lens_q=starts).last_hidden_state for model in (flat, padded)
    )
    assert_close(found, expected, **CLOSE)
    assert_close(found[:, 5:], flat(input_ids[:, 5:]).last_hidden_state, **CLOSE)


def packed(lengths=(5, 9)):
    """Sequences one after the other in one row, as flattening collators make them, and the sequences alone."""
    rows = [ids[None, :length] for ids, length in zip(token_batch(lengths=lengths)[0], lengths, strict=True)]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    restart = torch.cat([torch.arange(length) for length in lengths])[None]
    lens = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    marks = {"restart": {"position_ids": restart}, "lengths": lens, "both": {"position_ids": restart, **lens}}
    return torch.cat(rows, dim=1), marks, rows


@pytest.mark.parametrize("scheme", POSITIONS)
def test_packed_rows_are_apart(scheme):
    """Cases 6 and 8: with and without an all-ones mask, forward and gradients, with a position offset."""
    input_ids, marks, rows = packed()
    for window, back_end, free in itertools.product(WINDOWS, BACK_ENDS, (True, False)):
        fields = {"position_embedding_type": scheme, "position_offset": 2, "padding_free": free, **WINDOWS[window]}
        model = build(DsxEncoderModel, tiny_config(**fields), back_end)
        alone = torch.cat([model(row).last_hidden_state for row in rows], dim=1)
        probe = torch.randn(alone.shape) / alone.numel() ** 0.5
        (alone * probe).sum().backward()
        expected = gradients(model)
        for (mark, inputs), ones in itertools.product(marks.items(), (None, torch.ones_like(input_ids))):
            where = (window, back_end, free, mark, ones is None)
            model.zero_grad()
            found = model(input_ids, attention_mask=ones, **inputs).last_hidden_state
            assert_close(found, alone, **CLOSE, msg=lambda text, where=where: f"{where}: {text}")
            if mark != "both":
                (found * probe).sum().backward()
                for name, gradient in gradients(model).items():
                    assert_close(
                        gradient, expected[name], atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
                    )


@pytest.mark.parametrize("scheme", POSITIONS)
def test_packed_rows_of_a_batch_with_padding(scheme):
    """Two rows, each packed, the second one padded at its end."""
    input_ids, marks, rows = packed()
    batch = torch.stack([input_ids[0], torch.cat([rows[1][0, :6], rows[0][0], torch.zeros(3, dtype=torch.long)])])
    restart = torch.stack(
        [marks["restart"]["position_ids"][0], torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0, 0, 0])]
    )
    mask = torch.ones_like(batch)
    mask[1, -3:] = 0
    for free in (True, False):
        fields = {"position_embedding_type": scheme, "padding_free": free, **WINDOWS["sliding"]}
        model = build(DsxEncoderModel, tiny_config(**fields))
        with torch.no_grad():
            found = model(batch, attention_mask=mask, position_ids=restart).last_hidden_state
            for row, start, tokens in ((0, 0, rows[0]), (0, 5, rows[1]), (1, 0, rows[1][:, :6]), (1, 6, rows[0])):
                alone = model(tokens).last_hidden_state[0]
                assert_close(found[row, start : start + tokens.shape[1]], alone, **CLOSE)
        assert found[1, -3:].abs().max() == 0


# Dropout


def dropped(rates=None, **fields):
    """A model with the given rates (1 too: all is dropped, so that the result is known) in training and evaluation."""
    config = tiny_config(**fields)
    for name, rate in (rates or {}).items():
        setattr(config, name, rate)  # not checked on assignment, and 1.0 is refused at construction
    model = build(DsxEncoderModel, config, "sdpa")
    input_ids, mask = token_batch()
    with torch.no_grad():
        still = model(input_ids, attention_mask=mask).last_hidden_state
        moved = model.train()(input_ids, attention_mask=mask).last_hidden_state
    return model, moved, still, input_ids, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 1 / 3])
def test_dropout_keeps_its_rate_and_its_mean(rate, dtype):
    layer = DsxEncoderDropout(rate)
    ones = torch.ones(401, 333, dtype=dtype, requires_grad=True)  # 133,533 elements, no multiple of four
    found = layer(ones)
    scale = torch.tensor(1 / (1 - rate), dtype=dtype)
    assert_close(found.detach().unique(), torch.stack((torch.zeros_like(scale), scale)), rtol=2e-3, atol=0)
    zeros = (found == 0).float()
    spread = 5 * math.sqrt(rate * (1 - rate) / ones.numel())  # five standard errors
    assert abs(zeros.mean() - rate) < spread
    for axis, number in ((0, 401), (1, 333)):  # no row and no column is favoured
        assert (zeros.mean(dim=axis) - rate).abs().max() < 6 * math.sqrt(rate * (1 - rate) / number)
    for lag in (1, 2, 3, 4, 5):  # neighbours that share one draw fall independently
        flat = zeros.flatten()
        assert abs(((flat[lag:] - rate) * (flat[:-lag] - rate)).mean() / (rate * (1 - rate))) < 0.02
    found.sum().backward()
    assert torch.equal(ones.grad, found.detach())  # the same mask on the way back


def test_dropout_follows_the_seed_and_is_off_in_evaluation():
    layer, x = DsxEncoderDropout(0.3), torch.randn(7, 5)
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(layer(x) == 0)
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert layer.eval()(x) is x
    assert DsxEncoderDropout(1.0)(x).abs().max() == 0
    assert DsxEncoderDropout(0.0)(x) is x or torch.equal(DsxEncoderDropout(0.0)(x), x)
    assert layer.train()(x[:0]).shape == (0, 5)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("lengths", [(9, 4, 7), (9, 9, 9), (40, 33)])
def test_half_precision_trains_with_attention_in_fp32_on_a_cpu(lengths, autocast):
    """Torch's kernel there goes backward in half precision many times as slowly; inference keeps half precision."""
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is F.scaled_dot_product_attention:
                seen.append(({tensor.dtype for tensor in args[:3]}, torch.is_autocast_enabled("cpu")))
            return function(*args, **(kwargs or {}))

    for scheme, window in (("rope", "full"), ("alibi", "sliding"), ("relative_bias", "global")):
        model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, **WINDOWS[window]), "sdpa")
        model = model if autocast else model.to(torch.bfloat16)
        input_ids, mask = token_batch(lengths=lengths)
        outputs = []
        for wanted in (True, False):
            seen.clear()
            with torch.set_grad_enabled(wanted), torch.autocast("cpu", torch.bfloat16, enabled=autocast), Watch():
                outputs.append(model(input_ids, attention_mask=mask).last_hidden_state.float())
            assert seen
            if wanted:
                assert all(call == ({torch.float32}, False) for call in seen), (scheme, seen)
            else:
                assert all(torch.bfloat16 in dtypes and on == autocast for dtypes, on in seen), (scheme, seen)
        outputs[0].sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
        assert_close(outputs[0], outputs[1], atol=0.1, rtol=0.1)


def test_no_dropout_makes_training_equal_evaluation():
    _, moved, still, *_ = dropped()
    assert_close(moved, still, **CLOSE)


@pytest.mark.parametrize("rate", NO_DROPOUT)
def test_each_rate_alone_changes_training_only(rate):
    model, moved, still, input_ids, mask = dropped({rate: 0.5})
    assert not torch.allclose(moved, still, atol=1e-3)
    with torch.no_grad():
        assert_close(model.eval()(input_ids, attention_mask=mask).last_hidden_state, still, atol=0, rtol=0)


def test_dropout_of_embeddings_takes_all_of_the_input():
    model, moved, *_ = dropped({"embedding_dropout": 1.0})
    blank = build(DsxEncoderModel, tiny_config(scale_embeddings=False, position_embedding_type="none"))
    blank.load_state_dict(model.state_dict())
    blank.embeddings.word_embeddings.weight.data.zero_()
    input_ids, mask = token_batch()
    with torch.no_grad():
        assert_close(moved, blank(input_ids, attention_mask=mask).last_hidden_state, **CLOSE)


@pytest.mark.parametrize(
    ("rate", "silenced"),
    [
        ("attention_dropout", ("attention.out_proj",)),
        ("mlp_dropout", ("mlp.down_proj",)),
        ("hidden_dropout", ("attention.out_proj", "mlp.down_proj")),
    ],
)
@pytest.mark.parametrize("gated", [True, False])
def test_dropout_silences_its_own_place(rate, silenced, gated):
    """With rate 1 the model is the one whose projection after the dropped place is zero."""
    fields = {"gated_mlp": gated}
    model, moved, *_ = dropped({rate: 1.0}, **fields)
    twin = build(DsxEncoderModel, tiny_config(**fields))
    twin.load_state_dict(model.state_dict())
    for name, parameter in twin.named_parameters():
        if any(place in name for place in silenced):
            parameter.data.zero_()
    input_ids, mask = token_batch()
    with torch.no_grad():
        assert_close(moved, twin(input_ids, attention_mask=mask).last_hidden_state, **CLOSE)


# Static graphs


class Trunk(torch.nn.Module):
    """Tracing wants tensors in and a tensor out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def check_static(run, model):
    """The static form must follow the mask it is given, not the one it was made with."""
    for side in SIDES:
        input_ids, mask = token_batch(side)
        with torch.no_grad():
            assert_close(run(input_ids, mask), Trunk(model)(input_ids, mask), **CLOSE)


# One sliding layer holds all that is special and keeps these short.
STATIC = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 2, "num_global_tokens": 1}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", POSITIONS)
def test_export_and_trace(scheme):
    model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, **STATIC))
    example = token_batch("right")
    with torch.no_grad():
        exported = torch.export.export(Trunk(model), example, strict=False).module()
        check_static(exported, model)
        traced = torch.jit.trace(Trunk(model), example, check_trace=False)
        check_static(traced, model)


SLOW_SCHEMES = [pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("sinusoidal", "rope", "alibi", "none")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", ["learned", "relative_bias", *SLOW_SCHEMES])
def test_export_with_dynamic_shapes(scheme):
    """No length may be burnt in, neither that of the example nor that of the window."""
    model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, **STATIC))
    batch, length = torch.export.Dim("batch", min=2, max=16), torch.export.Dim("length", min=2, max=32)
    shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    with torch.no_grad():
        program = torch.export.export(Trunk(model), token_batch("right"), dynamic_shapes=shapes, strict=False)
        input_ids, mask = token_batch("left", lengths=(5, 13, 11, 2))
        assert_close(program.module()(input_ids, mask), Trunk(model)(input_ids, mask), **CLOSE)


@pytest.mark.parametrize("scheme", ["learned", "relative_bias", *SLOW_SCHEMES])
def test_compile_keeps_one_graph(scheme):
    model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, **STATIC))
    torch.compiler.reset()
    compiled = torch.compile(Trunk(model), backend="eager", fullgraph=True)
    check_static(compiled, model)


def test_traced_heads_take_other_batches():
    model = build(DsxEncoderForSequenceClassification, tiny_config())
    model.config.return_dict = False
    input_ids, mask = token_batch("left")
    traced = torch.jit.trace(model, (input_ids, mask), check_trace=False)
    assert_close(traced(input_ids[:2], mask[:2])[0], model(input_ids[:2], mask[:2])[0], **CLOSE)
