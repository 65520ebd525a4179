"""Which layout a batch gets, and variable-length layouts against the padded batch, with plain kernels on the CPU."""

import itertools
import sys

import kernels
import pytest
import torch
from test_packed_rows import LENGTHS, UNEVEN, assert_same_outcome, batch_of, outcome, pack
from tiny import HEADS, POSITIONS, SIDES, build, for_head, labels_for, tiny_config, token_batch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from modeling_dsx_encoder import DsxEncoderModel
from modeling_dsx_encoder import layouts_dsx_encoder as layouts
from modeling_dsx_encoder.attention_dsx_encoder import FlatLayout, RectangularLayout
from modeling_dsx_encoder.layouts_dsx_encoder import Machine, VariableLengthLayout, kernel_serves, layout_class

GPU = Machine("cuda", torch.bfloat16, (9, 0))
UNBIASED = ("sinusoidal", "learned", "rope", "none")


# The choice


def layout_of(config, kind, length, attn_implementation="sdpa", **more):
    """The rectangle of a batch that is padded, packed, both or full."""
    input_ids = torch.ones(2, length, dtype=torch.long)
    mask, positions = torch.ones_like(input_ids), torch.arange(length).expand(2, -1).clone()
    if "padded" in kind:
        mask[1, -length // 3 :] = 0
    if "packed" in kind:
        positions[:, length // 3 :] -= length // 3
    config._attn_implementation = attn_implementation
    inputs = {"attention_mask": mask, "position_ids": positions, "cu_seq_lens": None, "output_attentions": False}
    return RectangularLayout.from_inputs(config, input_ids.shape, input_ids.device, **{**inputs, **more})


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 2}
SHORT, LONG = 30, 1500
ONE_CALL, FLAT, PADDED = VariableLengthLayout, FlatLayout, RectangularLayout
CHOICES = [
    # machine, back end, fields, batch, length, what it gets
    (GPU, "sdpa", {}, "full", SHORT, PADDED),
    (GPU, "sdpa", {}, "full", LONG, PADDED),
    (GPU, "sdpa", {}, "padded", SHORT, ONE_CALL),
    (GPU, "sdpa", {}, "packed", SHORT, ONE_CALL),
    (GPU, "sdpa", SLIDING, "full", SHORT, ONE_CALL),
    (GPU, "sdpa", SLIDING, "full", 3, PADDED),
    (GPU, "flash_attention_2", {}, "full", SHORT, PADDED),
    (GPU, "flash_attention_2", {}, "packed padded", SHORT, ONE_CALL),
    (GPU, "flash_attention_3", SLIDING, "padded", LONG, ONE_CALL),
    (GPU, "eager", {}, "padded", SHORT, PADDED),
    (GPU, "eager", SLIDING, "full", LONG, FLAT),
    (GPU, "flex_attention", SLIDING, "packed padded", LONG, PADDED),
    (GPU._replace(dtype=torch.float32), "sdpa", {}, "padded", LONG, PADDED),
    (GPU._replace(dtype=torch.float32), "sdpa", {}, "packed", SHORT, PADDED),
    (GPU._replace(dtype=torch.float32), "sdpa", {}, "packed", LONG, FLAT),
    (GPU._replace(dtype=torch.float32), "sdpa", SLIDING, "full", 500, PADDED),
    (GPU._replace(dtype=torch.float32), "sdpa", SLIDING, "full", LONG, FLAT),
    (GPU._replace(dtype=torch.float32), "flash_attention_2", SLIDING, "packed", LONG, PADDED),
    (GPU, "sdpa", SLIDING | {"position_embedding_type": "alibi"}, "padded", SHORT, PADDED),
    (GPU, "sdpa", SLIDING | {"position_embedding_type": "alibi"}, "padded", LONG, FLAT),
    (GPU, "sdpa", {"position_embedding_type": "relative_bias"}, "padded", LONG, PADDED),
    (GPU, "sdpa", SLIDING | {"num_global_tokens": 1}, "padded", LONG, FLAT),
    (GPU, "sdpa", {"num_global_tokens": 1}, "padded", LONG, ONE_CALL),
    (Machine("mps", torch.float16), "sdpa", SLIDING, "full", LONG, FLAT),
    (Machine("mps", torch.float16), "sdpa", {}, "padded", SHORT, PADDED),
    (Machine("xpu", torch.bfloat16), "flash_attention_2", {}, "padded", SHORT, ONE_CALL),
    (Machine("cpu", torch.bfloat16), "sdpa", {}, "padded", SHORT, FLAT),
    (Machine("cpu", torch.float32), "eager", {}, "packed", SHORT, FLAT),
    (Machine("cpu", torch.float32), "sdpa", SLIDING, "full", SHORT, PADDED),
    (Machine("cpu", torch.float32), "sdpa", SLIDING, "full", LONG, FLAT),
    (Machine("cpu", torch.bfloat16), "flash_attention_2", {}, "padded", SHORT, PADDED),
]


@pytest.mark.parametrize(("machine", "back_end", "fields", "batch", "length", "expected"), CHOICES)
def test_the_layout_follows_machine_back_end_and_batch(machine, back_end, fields, batch, length, expected):
    layout = layout_of(tiny_config(**fields), batch, length, back_end)
    assert layout_class(layout, machine) is expected


@pytest.mark.parametrize(
    ("machine", "fields", "dropout", "served"),
    [
        (GPU, {}, 0.0, True),
        (GPU._replace(dtype=torch.float16), {}, 0.0, True),
        (GPU._replace(capability=(8, 0)), {}, 0.0, True),
        (GPU._replace(capability=(12, 0)), {}, 0.0, True),
        (GPU, {"hidden_size": 1024, "num_attention_heads": 4}, 0.0, True),
        (GPU, {"hidden_size": 1056, "num_attention_heads": 4}, 0.0, False),
        (GPU, {"hidden_size": 48, "num_attention_heads": 4}, 0.0, False),
        (GPU, {}, 0.1, False),
        (GPU._replace(capability=(7, 5)), {}, 0.0, False),
        (GPU._replace(capability=(0, 0)), {}, 0.0, False),
        (GPU._replace(dtype=torch.float32), {}, 0.0, False),
        (GPU._replace(device_type="xpu"), {}, 0.0, False),
    ],
)
def test_what_the_kernel_of_torch_serves(machine, fields, dropout, served):
    assert kernel_serves(tiny_config(**fields), machine, "sdpa", dropout) is served


def test_flash_drops_weights_itself():
    assert kernel_serves(tiny_config(), GPU, "flash_attention_2", 0.1)


@pytest.mark.parametrize("scheme", POSITIONS)
def test_kernels_add_no_bias_to_scores(scheme):
    config = tiny_config(position_embedding_type=scheme)
    for name in ("sdpa", "flash_attention_2", "flash_attention_3"):
        assert kernel_serves(config, GPU, name) is (scheme in UNBIASED)


def test_a_back_end_is_known_by_its_function_not_by_its_name():
    """Kernels of the Hub are transformers' flash function under the name of their repository."""
    AttentionInterface.register("someone/kernel", flash_attention_forward)
    AttentionInterface.register("my_flash", sdpa_mask)
    assert kernel_serves(tiny_config(), GPU, "someone/kernel")
    assert not kernel_serves(tiny_config(), GPU, "my_flash")
    assert not kernel_serves(tiny_config(), GPU, "unknown")


@pytest.fixture
def fresh_search():
    layouts.variable_length_attention.cache_clear()
    yield
    layouts.variable_length_attention.cache_clear()


def test_a_torch_without_windows_has_no_kernel(monkeypatch, fresh_search):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, cu_seq_q, is_causal=False: query)
    assert layouts.variable_length_attention() is None
    assert not kernel_serves(tiny_config(), GPU, "sdpa")
    assert kernel_serves(tiny_config(), GPU, "flash_attention_2")


def test_a_torch_without_variable_lengths_has_no_kernel(monkeypatch, fresh_search):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert layouts.variable_length_attention() is None


def test_the_dtype_is_that_of_autocast_or_of_the_model():
    like = torch.zeros(2, 3, dtype=torch.long)
    assert Machine.of(like, torch.float32) == ("cpu", torch.float32, (0, 0))
    assert Machine.of(like, torch.float16) == ("cpu", torch.float16, (0, 0))
    with torch.autocast("cpu", torch.bfloat16):
        assert Machine.of(like, torch.float32) == ("cpu", torch.bfloat16, (0, 0))


# One call of a kernel


@pytest.fixture(params=["sdpa", "dsx_flash"])
def kernel(request, monkeypatch):
    """A CPU that passes for a GPU, with plain kernels; flash goes all the way through transformers."""
    monkeypatch.setattr(Machine, "of", classmethod(lambda cls, like, dtype: GPU))
    monkeypatch.setattr(layouts, "variable_length_attention", lambda: kernels.varlen_attn)
    AttentionInterface.register("dsx_flash", flash_attention_forward)
    AttentionMaskInterface.register("dsx_flash", flash_attention_mask)
    reference = kernels.flash_attn_varlen_func
    monkeypatch.setattr(flash, "_loaded_implementation", "dsx_flash")
    monkeypatch.setattr(flash, "_flash_varlen_fn", reference)
    monkeypatch.setattr(flash, "_process_flash_kwargs_fn", flash._lazy_define_process_function(reference))
    kernels.CALLS.clear()
    return request.param


def windows(grouped=True):
    """Full and sliding layers; windows of nothing, of little and of more than the text."""
    groups = {"num_key_value_heads": 2} if grouped else {}
    yield "full", groups
    for radius in (1, 2, 7, 30):
        yield radius, {**groups, **SLIDING, "sliding_window": radius}


def models_of(name, kernel, **fields):
    flat = build(HEADS[name], tiny_config(**fields), kernel)
    return flat, build(HEADS[name], tiny_config(padding_free=False, **fields), "sdpa")


@pytest.mark.parametrize("scheme", UNBIASED)
@pytest.mark.parametrize("name", HEADS)
def test_one_call_of_a_kernel_equals_the_padded_batch(name, scheme, kernel):
    """Logits, losses and every gradient, whatever the side of the padding."""
    sides = itertools.cycle(SIDES)
    poolings = itertools.cycle(("cls", "mean", "max"))
    for window, fields in windows():
        fields |= {"position_embedding_type": scheme, "classifier_pooling": next(poolings)}
        flat, padded = models_of(name, kernel, **fields)
        side = next(sides)
        for lengths, extra in ((UNEVEN, 0), ((5,), 2)):
            inputs = batch_of(name, side, lengths, extra)
            kernels.CALLS.clear()
            found = outcome(flat, name, inputs, train=True)
            assert len(kernels.CALLS) == 2  # one a layer
            assert_same_outcome(found, outcome(padded, name, inputs, train=True), (window, side, lengths))


@pytest.mark.parametrize("name", HEADS)
def test_one_call_of_a_kernel_serves_packed_rows(name, kernel):
    input_ids, mask = token_batch("right", lengths=LENGTHS)
    inputs = for_head(name, input_ids, mask) | labels_for(name, input_ids, mask)
    packed, marks = pack(name, inputs, inputs["attention_mask"])
    for scheme, (window, fields) in zip(itertools.cycle(UNBIASED), windows(grouped=False), strict=False):
        flat, padded = models_of(name, kernel, position_embedding_type=scheme, **fields)
        logits, loss, grads = outcome(padded, name, inputs)
        if name in ("token", "masked_lm"):
            logits = logits[mask.bool()][None]
        for mark, extra in marks.items():
            kernels.CALLS.clear()
            found = outcome(flat, name, {**packed, **extra})
            assert len(kernels.CALLS) == 2
            assert_same_outcome(found, (logits, loss, grads), (window, mark))


def test_windows_reach_the_kernel_as_inclusive_radii(kernel):
    model = build(DsxEncoderModel, tiny_config(**SLIDING), kernel)
    model(*token_batch())
    assert [call["window"] for call in kernels.CALLS] == [(-1, -1), (2, 2)]


def test_a_full_batch_under_windows_needs_no_mask(kernel):
    fields = {"num_key_value_heads": 1, **SLIDING}
    flat, padded = (build(DsxEncoderModel, tiny_config(padding_free=free, **fields), kernel) for free in (True, False))
    padded.set_attn_implementation("sdpa")
    input_ids = token_batch(lengths=(12, 12))[0]
    assert_close(flat(input_ids).last_hidden_state, padded(input_ids).last_hidden_state, atol=1e-5, rtol=1e-5)
    assert len(kernels.CALLS) == 2


def test_positions_of_the_caller_reach_the_kernel_rotated(kernel):
    """A window counts tokens, a rotation follows the numbers that the caller gives."""
    input_ids, mask = token_batch()
    positions = torch.arange(9)[None] * 2 + 3
    flat, padded = models_of("token", kernel, position_embedding_type="rope", **SLIDING)
    found, expected = (
        model(input_ids, attention_mask=mask, position_ids=positions).logits for model in (flat, padded)
    )
    assert len(kernels.CALLS) == 2
    assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scheme", UNBIASED)
def test_kernels_get_one_dtype_under_autocast(scheme, kernel):
    """Rotated queries and keys are fp32 there, values are not."""
    flat, padded = models_of("sequence", kernel, position_embedding_type=scheme)
    inputs = batch_of("sequence", "left", UNEVEN)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (outcome(model, "sequence", inputs) for model in (flat, padded))
    assert {call["dtype"] for call in kernels.CALLS} == {torch.bfloat16}
    assert_same_outcome(found, expected, scheme, tolerance=3e-2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_call_the_kernel_again(reentrant, kernel):
    flat, padded = models_of("sequence", kernel, position_embedding_type="rope", **SLIDING)
    for model in (flat, padded):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    inputs = batch_of("sequence", "holes", UNEVEN)
    found, expected = (outcome(model, "sequence", inputs, train=True) for model in (flat, padded))
    assert len(kernels.CALLS) == 4
    assert_same_outcome(found, expected, reentrant)


def test_dropout_of_weights_reaches_flash_and_keeps_torch_padded(kernel):
    model = build(DsxEncoderModel, tiny_config(attention_dropout=0.25), kernel)
    model.train()(*token_batch())
    dropped = {call["dropout"] for call in kernels.CALLS}
    assert dropped == ({0.25} if kernel == "dsx_flash" else set())
    kernels.CALLS.clear()
    model.eval()(*token_batch())
    assert len(kernels.CALLS) == 2


def test_what_is_more_than_padding_stays_padded(kernel):
    model = build(DsxEncoderModel, tiny_config(), kernel)
    input_ids, mask = token_batch()
    for more in ({"output_attentions": True}, {"output_hidden_states": True}):
        assert type(model.layout(input_ids, mask, **more)) is RectangularLayout
    pairs = mask[:, None, :].expand(-1, 9, -1)
    assert type(model.layout(input_ids, pairs)) is RectangularLayout
    assert type(model.layout(input_ids, torch.zeros_like(mask))) is RectangularLayout
    assert type(model.layout(input_ids, mask)) is VariableLengthLayout


def test_the_edges_move_with_the_layout(kernel):
    layout = build(DsxEncoderModel, tiny_config(), kernel).layout(*token_batch())
    assert layout.cu_seq_lens.tolist() == [0, 4, 11, 20]
    assert (layout.max_length, layout.groups) == (9, ((1, 4), (1, 7), (1, 9)))
    moved = layout.to("meta")
    assert {moved.cu_seq_lens.device.type, moved.indices.device.type} == {"meta"}
    assert moved.cu_seq_lens.dtype == torch.int32
    assert moved.max_length == 9


def test_flash_says_where_it_cannot_take_packed_rows(kernel):
    model = build(DsxEncoderModel, tiny_config(padding_free=False), "dsx_flash")
    with pytest.raises(ValueError, match=r"packed rows in the padded layout \(padding_free=False.*dsx_flash.*sdpa"):
        model(token_batch(lengths=(6,))[0], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_the_plain_kernel_is_that_of_the_padded_batch():
    """The yardstick itself: without windows it is SDPA, with one it hides what is farther away."""
    query, key, value = torch.randn(3, 7, 2, 8).unbind()
    edges = torch.tensor([0, 7], dtype=torch.int32)
    for window, reach in (((-1, -1), 7), ((2, 2), 2), ((0, 0), 0)):
        found = kernels.varlen_attn(query, key, value, edges, edges, 7, 7, scale=0.3, window_size=window)
        near = (torch.arange(7)[:, None] - torch.arange(7)).abs() <= reach
        mask = torch.zeros(7, 7).masked_fill(~near, -torch.inf)
        module = torch.nn.Module()
        heads = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        expected, _ = sdpa_attention_forward(module, *heads, mask, scaling=0.3, is_causal=False)
        assert_close(found, expected[0])


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operator made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return results


@pytest.mark.parametrize("arrangement", ["alone", "padded", "packed"])
@pytest.mark.parametrize("scheme", POSITIONS)
def test_no_tensor_of_length_by_length_under_windows(scheme, arrangement):
    """Forward and backward of 2048 tokens keep to the window: nothing is near 2048 x 2048 elements."""
    length, radius = 2048, 16
    config = tiny_config(
        position_embedding_type=scheme,
        layer_types=["sliding_attention"] * 2,
        sliding_window=radius,
        max_position_embeddings=length,
    )
    model = build(DsxEncoderModel, config)
    input_ids = token_batch(lengths=(length, length))[0]
    inputs = {"input_ids": input_ids[:1]}
    if arrangement == "padded":
        mask = torch.ones_like(input_ids)
        mask[1, length // 2 :] = 0
        inputs = {"input_ids": input_ids, "attention_mask": mask}
    elif arrangement == "packed":
        inputs = {"input_ids": input_ids.view(1, -1), "position_ids": torch.arange(length).repeat(2)[None]}
    with LargestTensor() as largest:
        model(**inputs).last_hidden_state.sum().backward()
    assert 0 < largest.elements < length * length // 4
