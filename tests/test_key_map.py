"""Key maps move tensors between two naming schemes, bit by bit, and name whatever has no place."""

import pytest
import torch

from modeling_dsx_encoder.key_map import KeyMap

MAP = {
    "table": "words",
    "layer.{}.q": "layers.{}.qkv_proj[0]",
    "layer.{}.k": "layers.{}.qkv_proj[1]",
    "layer.{}.v": "layers.{}.qkv_proj[2]",
    "layer.{}.gate_and_up[0]": "layers.{}.gate",
    "layer.{}.gate_and_up[1]": "layers.{}.up",
    "head.decoder": "decoder",
    "head.bias": "decoder.bias",
    "head.other": None,
}
QKV_SIZES = (8, 4, 4)  # two query heads of four for each pair of key and value heads


def stock_state(num_layers=12):
    """Weights of a made-up model with grouped-query attention and a fused gate."""
    torch.manual_seed(0)
    state = {"table.weight": torch.randn(7, 8), "head.other.weight": torch.randn(2, 8)}
    state |= {"head.decoder.weight": torch.randn(7, 8), "head.decoder.bias": torch.randn(7)}
    state["head.bias"] = state["head.decoder.bias"]
    for layer in range(num_layers):
        for name, rows in zip("qkv", QKV_SIZES, strict=True):
            state[f"layer.{layer}.{name}.weight"] = torch.randn(rows, 8)
            state[f"layer.{layer}.{name}.bias"] = torch.randn(rows)
        state[f"layer.{layer}.gate_and_up.weight"] = torch.randn(10, 8)
    return state


def our_shapes(num_layers=12):
    shapes = {"words.weight": (7, 8), "decoder.weight": (7, 8), "decoder.bias": (7,)}
    for layer in range(num_layers):
        shapes |= {f"layers.{layer}.qkv_proj.weight": (16, 8), f"layers.{layer}.qkv_proj.bias": (16,)}
        shapes |= {f"layers.{layer}.gate.weight": (5, 8), f"layers.{layer}.up.weight": (5, 8)}
    return shapes


def shapes_of(state):
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


def test_every_tensor_arrives_in_its_part_and_comes_back_bit_equal():
    state, key_map = stock_state(), KeyMap(MAP, QKV_SIZES)
    moved = key_map.to_ours(state, our_shapes())
    assert shapes_of(moved.state) == our_shapes()
    fused = moved.state["layers.11.qkv_proj.weight"]
    assert torch.equal(fused[8:12], state["layer.11.k.weight"])
    assert torch.equal(moved.state["layers.3.up.weight"], state["layer.3.gate_and_up.weight"][5:])
    assert (moved.dropped, moved.differing) == (["head.other.weight"], [])

    back = key_map.to_stock(moved.state, shapes_of(state))
    assert back.dropped == ["head.other.weight"]
    assert set(back.state) == set(state) - {"head.other.weight"}
    assert all(torch.equal(tensor, state[key]) for key, tensor in back.state.items())


def test_moved_tensors_share_nothing_with_their_source():
    state = stock_state(1)
    moved = KeyMap(MAP, QKV_SIZES).to_ours(state, our_shapes(1))
    before = state["table.weight"].clone()
    moved.state["words.weight"].zero_()
    assert torch.equal(state["table.weight"], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_stay(dtype):
    state = {key: tensor.to(dtype) for key, tensor in stock_state(1).items()}
    moved = KeyMap(MAP, QKV_SIZES).to_ours(state, our_shapes(1))
    assert {tensor.dtype for tensor in moved.state.values()} == {dtype}


def test_of_copies_the_first_of_the_map_counts_and_a_different_one_is_named():
    state = stock_state(1) | {"head.bias": torch.zeros(7)}
    moved = KeyMap(MAP, QKV_SIZES).to_ours(state, our_shapes(1))
    assert torch.equal(moved.state["decoder.bias"], state["head.decoder.bias"])
    assert moved.differing == ["head.bias"]


def test_a_key_outside_the_map_is_named():
    with pytest.raises(ValueError, match=r"no place: adapter.weight, layer.0.q.scale.weight"):
        KeyMap(MAP, QKV_SIZES).to_ours(
            stock_state(1) | {"adapter.weight": torch.ones(1), "layer.0.q.scale.weight": torch.ones(1)}, our_shapes(1)
        )


def test_a_parameter_that_only_one_side_has_is_named():
    state, key_map = stock_state(1), KeyMap(MAP, QKV_SIZES)
    with pytest.raises(ValueError, match=r"table.bias -> words.bias"):
        key_map.to_ours(state | {"table.bias": torch.ones(7)}, our_shapes(1))
    with pytest.raises(ValueError, match=r"our model has weights .*: norm.weight"):
        key_map.to_ours(state, our_shapes(1) | {"norm.weight": (8,)})
    ours = key_map.to_ours(state, our_shapes(1)).state
    with pytest.raises(ValueError, match=r"our model has weights .*: norm.weight"):
        key_map.to_stock(ours | {"norm.weight": torch.ones(8)}, shapes_of(state))
    with pytest.raises(ValueError, match=r"table.bias <- words.bias"):
        key_map.to_stock(ours, shapes_of(state) | {"table.bias": (7,)})
    with pytest.raises(ValueError, match=r"no place: adapter.weight"):
        key_map.to_stock(ours, shapes_of(state) | {"adapter.weight": (1,)})


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("table.weight", (6, 8), r"table.weight has shape \(6, 8\), but words.weight takes \(7, 8\)"),
        (
            "layer.0.k.weight",
            (8, 8),
            r"layer.0.k.weight has shape \(8, 8\), but layers.0.qkv_proj.weight\[1\] takes \(4, 8\)",
        ),
        (
            "layer.0.gate_and_up.weight",
            (12, 8),
            r"gate_and_up.weight\[0\] has shape \(6, 8\), but layers.0.gate.weight takes \(5, 8\)",
        ),
        ("layer.0.gate_and_up.weight", (11, 8), "11 rows, which are no 2 equal parts"),
    ],
)
def test_a_shape_that_does_not_fit_is_named_with_both_keys_and_shapes(key, shape, message):
    with pytest.raises(ValueError, match=message):
        KeyMap(MAP, QKV_SIZES).to_ours(stock_state(1) | {key: torch.ones(shape)}, our_shapes(1))


def test_a_shape_that_does_not_fit_on_the_way_back_is_named_with_both_keys_and_shapes():
    state, key_map = stock_state(1), KeyMap(MAP, QKV_SIZES)
    ours = key_map.to_ours(state, our_shapes(1)).state
    with pytest.raises(ValueError, match=r"words.weight has shape \(7, 8\), but table.weight takes \(9, 8\)"):
        key_map.to_stock(ours, shapes_of(state) | {"table.weight": (9, 8)})


def test_a_missing_part_is_a_shape_that_does_not_fit():
    state = {key: tensor for key, tensor in stock_state(1).items() if not key.endswith(".v.weight")}
    with pytest.raises(ValueError, match=r"layers.0.qkv_proj.weight has shape \(12, 8\).*takes \(16, 8\)"):
        KeyMap(MAP, QKV_SIZES).to_ours(state, our_shapes(1))
