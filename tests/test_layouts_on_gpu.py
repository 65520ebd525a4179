"""Layouts on a CUDA device, with the real kernels: `pytest -m gpu`. Each test skips where its kernel is not there."""

import itertools

import pytest
import torch
from test_packed_rows import LENGTHS, UNEVEN, assert_same_outcome, batch_of, outcome, pack
from tiny import HEADS, SIDES, build, for_head, gradients, labels_for, tiny_config, token_batch
from transformers.utils import is_flash_attn_2_available

from modeling_dsx_encoder import DsxEncoderModel
from modeling_dsx_encoder.attention_dsx_encoder import FlatLayout, RectangularLayout
from modeling_dsx_encoder.layouts_dsx_encoder import Machine, VariableLengthLayout, torch_kernel_serves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

UNBIASED = ("sinusoidal", "learned", "rope", "none")
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 2, "num_key_value_heads": 2}
WINDOWS = {"full": {}, "sliding": SLIDING, "wide": {**SLIDING, "sliding_window": 30}}
LONG_TEXT = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "max_position_embeddings": 16384}
NEAR = 2e-2  # of the largest entry: half precision


def on_gpu(value):
    return {name: tensor.cuda() for name, tensor in value.items()} if isinstance(value, dict) else value.cuda()


@pytest.fixture(params=["sdpa", "flash_attention_2"])
def kernel(request):
    """The name of a back end with variable lengths on this machine."""
    if request.param == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed")
    machine = Machine.of(torch.zeros(1, device="cuda"), torch.bfloat16)
    if request.param == "sdpa" and not torch_kernel_serves(tiny_config(), machine, 0.0):
        pytest.skip("torch has no variable-length kernel here")
    return request.param


def pair_of(name, kernel, dtype=torch.bfloat16, **fields):
    """The same weights flat, with the kernel, and padded, with SDPA and masks."""
    model_class = HEADS.get(name, DsxEncoderModel)
    flat = build(model_class, tiny_config(**fields), "sdpa").to("cuda", dtype)
    padded = build(model_class, tiny_config(padding_free=False, **fields), "sdpa").to("cuda", dtype)
    flat.set_attn_implementation(kernel)
    return flat, padded


@pytest.mark.parametrize("scheme", UNBIASED)
@pytest.mark.parametrize("name", HEADS)
def test_the_kernel_equals_the_padded_batch(name, scheme, kernel):
    """Logits, losses and every gradient in bfloat16; left, right, holes; grouped queries; windows."""
    for (window, fields), side in zip(WINDOWS.items(), SIDES, strict=True):
        flat, padded = pair_of(name, kernel, position_embedding_type=scheme, **fields)
        for lengths, extra in ((UNEVEN, 0), ((5,), 2)):
            inputs = on_gpu(batch_of(name, side, lengths, extra))
            rows = [inputs[key].flatten(0, -2) for key in ("input_ids", "attention_mask")]
            assert type(flat.model.layout(*rows)) is VariableLengthLayout
            found, expected = (outcome(model, name, inputs, train=True) for model in (flat, padded))
            assert_same_outcome(found, expected, (window, side, lengths), tolerance=NEAR)


@pytest.mark.parametrize("name", HEADS)
def test_the_kernel_serves_packed_rows(name, kernel):
    input_ids, mask = token_batch("right", lengths=LENGTHS)
    inputs = for_head(name, input_ids, mask) | labels_for(name, input_ids, mask)
    packed, marks = pack(name, inputs, inputs["attention_mask"])
    for window, fields in WINDOWS.items():
        flat, padded = pair_of(name, kernel, position_embedding_type="rope", **fields)
        logits, loss, grads = outcome(padded, name, on_gpu(inputs))
        if name in ("token", "masked_lm"):
            logits = logits[mask.bool()][None]
        for mark, extra in marks.items():
            extra = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in extra.items()}
            found = outcome(flat, name, {**on_gpu(packed), **extra})
            assert_same_outcome(found, (logits, loss, grads), (window, mark), tolerance=NEAR)


def test_no_layer_waits_for_the_device(kernel):
    """Once the layout is there, nothing on the way reads a value back."""
    model, _ = pair_of("trunk", kernel, position_embedding_type="rope", **SLIDING)
    input_ids, mask = on_gpu(token_batch("left")[0]), on_gpu(token_batch("left")[1])
    layout = model.layout(input_ids, mask)
    with torch.no_grad():
        expected = model(input_ids, mask, layout=layout).last_hidden_state
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = model(input_ids, mask, layout=layout).last_hidden_state
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


def peak_of(model, input_ids):
    """Bytes above the weights, forward and backward."""
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(input_ids).last_hidden_state.float().square().sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory_of_long_texts_follows_the_window(kernel):
    """No mask or score of L x L: twice the text, twice the memory."""
    model, _ = pair_of("trunk", kernel, position_embedding_type="rope", **LONG_TEXT)
    peak_of(model, torch.randint(5, 99, (1, 64), device="cuda"))
    peaks = {length: peak_of(model, torch.randint(5, 99, (1, length), device="cuda")) for length in (8192, 16384)}
    assert peaks[16384] < 2.5 * peaks[8192]
    assert peaks[8192] < 2 * 8192 * 8192  # less than one score in half precision for each pair


@pytest.mark.parametrize("scheme", ["alibi", "relative_bias", "rope"])
def test_blocks_equal_the_padded_batch_in_full_precision(scheme):
    """What no kernel computes: biases and fp32, long, padded, on both sides of the length of blocks."""
    fields = {**LONG_TEXT, "layer_types": ["full_attention", "sliding_attention"], "max_position_embeddings": 2048}
    flat, padded = pair_of("sequence", "sdpa", torch.float32, position_embedding_type=scheme, **fields)
    for side in SIDES:
        inputs = on_gpu(batch_of("sequence", side, (1500, 900, 300, 20)))
        assert type(flat.model.layout(inputs["input_ids"], inputs["attention_mask"])) is FlatLayout
        found, expected = (outcome(model, "sequence", inputs) for model in (flat, padded))
        assert_same_outcome(found, expected, side, tolerance=1e-3)


@pytest.mark.parametrize("scheme", ["alibi", "relative_bias"])
def test_blocks_build_no_full_mask(scheme):
    fields = {**LONG_TEXT, "position_embedding_type": scheme}
    model, _ = pair_of("trunk", "sdpa", torch.float32, **fields)
    peak_of(model, torch.randint(5, 99, (1, 64), device="cuda"))
    peaks = {length: peak_of(model, torch.randint(5, 99, (1, length), device="cuda")) for length in (8192, 16384)}
    assert peaks[16384] < 2.5 * peaks[8192]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["masked_lm", "sequence"])
def test_a_training_step_under_autocast(name, dtype, kernel):
    """fp32 weights, half precision inside; fp16 with a scaled loss."""
    outcomes = []
    for model in pair_of(name, kernel, torch.float32, position_embedding_type="rope", **SLIDING):
        inputs = on_gpu(batch_of(name, "left", UNEVEN))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16, init_scale=256.0)
        with torch.autocast("cuda", dtype):
            input_ids, mask = (inputs[key] for key in ("input_ids", "attention_mask"))
            expected = VariableLengthLayout if model.config.padding_free else RectangularLayout
            assert type(model.model.layout(input_ids, mask)) is expected
            loss = model.train()(**inputs).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grads = gradients(model)
        before = model.model.embeddings.word_embeddings.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(before, model.model.embeddings.word_embeddings.weight)
        outcomes.append((loss.detach(), loss.detach(), grads))
    assert_same_outcome(*outcomes, (name, dtype), tolerance=3e-2)


def test_flash_drops_attention_weights_in_training_only():
    if not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed")
    model, _ = pair_of("trunk", "flash_attention_2", attention_dropout=0.5)
    input_ids, mask = (tensor.cuda() for tensor in token_batch("right"))
    with torch.no_grad():
        first, second = (model.train()(input_ids, mask).last_hidden_state for _ in range(2))
        third, fourth = (model.eval()(input_ids, mask).last_hidden_state for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(third, fourth)


def test_flash_turned_off_is_turned_off_here_too():
    model, _ = pair_of("trunk", "sdpa")
    input_ids, mask = (tensor.cuda() for tensor in token_batch("right"))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert type(model.layout(input_ids, mask)) is RectangularLayout


def test_a_compiled_model_stays_padded():
    """Shapes of a graph must not follow the data; its results are those of the kernel."""
    model, _ = pair_of("trunk", "sdpa", position_embedding_type="rope", **SLIDING)
    compiled = torch.compile(model, fullgraph=True)
    for side, lengths in itertools.product(SIDES, ((9, 4, 7), (9, 2, 1))):
        input_ids, mask = (tensor.cuda() for tensor in token_batch(side, lengths=lengths))
        with torch.no_grad():
            found = compiled(input_ids, mask).last_hidden_state
            expected = model(input_ids, mask).last_hidden_state
        assert (found - expected).abs().max() <= NEAR * expected.abs().max()
