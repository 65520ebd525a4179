"""The bound of the benchmark: the bare matrix products that the real tokens of a batch need, and nothing else.

No norms, activations, softmax, masks, residual sums or copies: what an encoder of this shape could reach if those were
free. Weight products run over the real tokens of the whole batch; attention products over the sequences of equal
length together; local attention meets 2 radius + 1 keys a query (the edges of a text, where there are fewer, are
counted as if they were not edges). Training adds the products of the backward, nothing recomputed.

Shapes: T real tokens of a batch, E hidden_size, F intermediate_size, H heads, K key-value heads, D head size.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from .configuration_dsx_encoder import DsxEncoderConfig

# Scores of one product at most: 8 MB in fp32, so that long texts stay near the caches, as fused attention keeps them.
MAX_SCORES = 1 << 21
# Queries that share a window of keys in local attention; the number of operations does not depend on it.
QUERY_BLOCK = 64


@dataclass(frozen=True)
class Product:
    """`left (batch, rows, inner) @ right (batch, inner, columns)`; a transposed operand lies the other way round.

    Args:
        weight: Number of the linear map whose weight is the right operand; None: activations.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    transposed: Literal["left", "right"] | None = None
    weight: int | None = None

    @property
    def num_operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.rows * self.inner * self.columns


def weight_products(config: DsxEncoderConfig, num_tokens: int, training: bool) -> list[Product]:
    """Products of one layer with its weights; a weight lies as (out, in)."""
    head_size = config.hidden_size // config.num_attention_heads
    projected = (config.num_attention_heads + 2 * config.num_key_value_heads) * head_size
    maps = [(config.hidden_size, projected), (config.hidden_size, config.hidden_size)]
    maps += [(config.hidden_size, config.intermediate_size)] * (2 if config.gated_mlp else 1)
    maps += [(config.intermediate_size, config.hidden_size)]
    products = []
    for index, (inputs, outputs) in enumerate(maps):
        products.append(Product(1, num_tokens, inputs, outputs, "right", index))
        if training:
            products.append(Product(1, num_tokens, outputs, inputs, None, index))  # gradient of the input
            products.append(Product(1, outputs, num_tokens, inputs, "left"))  # gradient of the weight
    return products


def attention_tiles(config: DsxEncoderConfig, layer_type: str, number: int, length: int) -> list[tuple[int, int, int]]:
    """`(batch, queries, keys)` of the products that `number` sequences of equal length need."""
    batch = number * config.num_attention_heads
    if layer_type == "full_attention":
        rows = min(length, max(1, MAX_SCORES // (batch * length)))
        tiles = [(batch, rows, length)] * (length // rows)
        keys = length
    else:
        rows = QUERY_BLOCK
        keys = min(length, 2 * config.sliding_window + 1)
        tiles = [(batch * (length // rows), rows, keys)] if length >= rows else []
    if length % rows:
        tiles.append((batch, length % rows, keys))
    return tiles


def attention_products(config: DsxEncoderConfig, layer_type: str, lengths: list[int], training: bool) -> list[Product]:
    """Products of one layer between queries, keys, weights and values."""
    size = config.hidden_size // config.num_attention_heads
    products = []
    for length, number in sorted(Counter(lengths).items()):
        for batch, rows, keys in attention_tiles(config, layer_type, number, length):
            products.append(Product(batch, rows, size, keys, "right"))  # Q K^T
            products.append(Product(batch, rows, keys, size))  # P V
            if training:
                products.append(Product(batch, rows, size, keys, "right"))  # gradient of P: dO V^T
                products.append(Product(batch, keys, rows, size, "left"))  # gradient of V: P^T dO
                products.append(Product(batch, rows, keys, size))  # gradient of Q: dS K
                products.append(Product(batch, keys, rows, size, "left"))  # gradient of K: dS^T Q
    return products


def layer_products(config: DsxEncoderConfig, layer_type: str, lengths: list[int], training: bool) -> list[Product]:
    """All products of one layer for texts of these lengths."""
    return [
        *weight_products(config, sum(lengths), training),
        *attention_products(config, layer_type, lengths, training),
    ]


class Bound:
    """The products of all layers, ready to run: operands and results are allocated beforehand."""

    def __init__(self, config: DsxEncoderConfig, training: bool, precision: str, device: str = "cpu"):
        self.config, self.training, self.device = config, training, device
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.pools: dict[str, torch.Tensor] = {}
        self.weights: dict[tuple[int, int], torch.Tensor] = {}

    def prepare(self, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
        """The step of one batch."""
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        layers = [
            layer_products(self.config, layer_type, lengths, self.training) for layer_type in self.config.layer_types
        ]
        calls = [self._bind(product, index) for index, layer in enumerate(layers) for product in layer]

        def step():
            with torch.inference_mode():
                for multiply, left, right, out in calls:
                    multiply(left, right, out=out)

        return step

    def _bind(self, product: Product, layer: int) -> tuple:
        batch, rows, inner, columns = product.batch, product.rows, product.inner, product.columns
        left = self._tensor("left", (batch, rows, inner), product.transposed == "left")
        right = self._tensor("right", (batch, inner, columns), product.transposed == "right", layer, product.weight)
        out = self._tensor("out", (batch, rows, columns))
        if batch == 1:
            return torch.mm, left[0], right[0], out[0]
        return torch.bmm, left, right, out

    def _tensor(self, pool, shape, transposed=False, layer=None, weight=None):
        """A view of shared memory, or of the weight's own: every layer reads other weights."""
        size = shape[0] * shape[1] * shape[2]
        key = pool if weight is None else (layer, weight)
        store = self.pools if weight is None else self.weights
        if key not in store or store[key].numel() < size:
            store[key] = torch.randn(size, device=self.device).to(self.dtype)
        stored = (shape[0], shape[2], shape[1]) if transposed else shape
        view = store[key][:size].view(stored)
        return view.transpose(1, 2) if transposed else view
