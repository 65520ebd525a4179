"""Losses of the DSX encoder's heads: sums over items, divided by their number in the whole accumulated batch.

- a label of -100 is no item; a batch without any costs 0 and still has a graph
- labels that do not fit the logits or the number of classes are refused by name

Shapes: B batch, L sequence, N number of labels.
"""

import torch
from torch import nn

from .attention_dsx_encoder import RectangularLayout, at_least_fp32
from .configuration_dsx_encoder import DsxEncoderConfig
from .positions_dsx_encoder import is_traced

# A label with this value is not an item: it adds nothing to the loss and nothing to the number of items.
IGNORE_INDEX = -100


def check_indices(name: str, indices: torch.Tensor | None, size_name: str, size: int) -> None:
    """Refuse numbers past a table's end on the CPU; elsewhere the check would wait for the device.

    Raises:
        ValueError: Naming the field, the value and the size.
    """
    if indices is None or indices.device.type != "cpu" or is_traced() or not indices.numel():
        return
    low, high = indices.min().item(), indices.max().item()
    if low < 0 or high >= size:
        raise ValueError(
            f"{name} must lie between 0 and {size_name} - 1 = {size - 1}, got {low if low < 0 else high}: tokenizer "
            f"or labels and the model's configuration do not belong together, or {size_name} has to be raised."
        )


def mean_over_items(total: torch.Tensor, items: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
    """`total` over the number of items: of the whole accumulated batch where the caller knows it, else of this one.

    Dividing each micro-batch by its own count and averaging would weigh items of short micro-batches more, and
    summing such means over accumulation steps gives a loss that grows with their number.
    """
    if num_items_in_batch is None:
        return total / items.sum().clamp(min=1)
    # A whole batch without an item (nothing was masked) costs 0, not 0 / 0.
    if isinstance(num_items_in_batch, torch.Tensor):
        return total / num_items_in_batch.to(total.device).clamp(min=1)
    return total / max(num_items_in_batch, 1)


def check_label_shape(labels: torch.Tensor, shape: torch.Size, name: str = "labels") -> None:
    """Refuse labels that do not lie over the logits one to one.

    Raises:
        ValueError: Naming both shapes.
    """
    if labels.shape != shape:
        raise ValueError(
            f"{name} has shape {tuple(labels.shape)}, but the head takes one label for each of {tuple(shape)}; of "
            "packed rows, heads with one answer a text take one for each packed sequence."
        )


def token_labels(labels: torch.Tensor, layout: RectangularLayout) -> torch.Tensor:
    """Labels `(B, L)` of the head's tokens; a label on padding is no item, as padding is not computed."""
    check_label_shape(labels, layout.batch_shape)
    labels = labels.to(layout.ranks.device)
    return layout.fill_padding(labels if labels.is_floating_point() else labels.long(), IGNORE_INDEX)


def cross_entropy_loss(logits, labels, num_items_in_batch=None, size_name="num_labels"):
    """Cross entropy of logits `(..., N)` against class numbers `(...)`, in fp32; a label of -100 is not an item.

    Without any item the loss is 0 and still has a graph, so that every process of a distributed run goes backward.
    """
    logits = logits.flatten(0, -2).to(at_least_fp32(logits.dtype))
    labels = labels.flatten().to(logits.device)
    if labels.is_floating_point() and not is_traced():
        fractions = labels[labels != labels.round()]
        if fractions.numel():
            raise ValueError(
                f"labels must be whole class numbers, got {fractions[0].item()}; for numbers as such set "
                "problem_type='regression'."
            )
    labels = labels.long()
    items = labels != IGNORE_INDEX
    # A masked copy, not `[items]`: the check must cost nothing where nothing is checked.
    check_indices("labels", labels.masked_fill(~items, 0), size_name, logits.shape[-1])
    total = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return mean_over_items(total, items, num_items_in_batch)


def answer_labels(starts, ends, length: int, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and ends of answers, `(B,)` or `(B, 1)`, as labels `(B,)`.

    Both are -100 where one of them lies outside the row of `length` or on padding: an answer is an item or is none.

    Raises:
        ValueError: Not one place a row.
    """
    labels, outside = [], False
    for places in (starts, ends):
        places = places.long().view(-1)
        if tokens is not None:
            check_label_shape(places, tokens.shape[:1], "start_positions and end_positions")
            places = places.to(tokens.device)
        outside = outside | (places < 0) | (places >= length)
        if tokens is not None:
            outside = outside | ~tokens.bool().gather(1, places.clamp(0, length - 1)[:, None]).squeeze(1)
        labels.append(places)
    return labels[0].masked_fill(outside, IGNORE_INDEX), labels[1].masked_fill(outside, IGNORE_INDEX)


def problem_type_of(config: DsxEncoderConfig, logits: torch.Tensor, labels: torch.Tensor) -> str:
    """The configured problem type, or the one that the shapes say; the configuration is never written to."""
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    return "multi_label_classification" if labels.shape == logits.shape else "single_label_classification"


def sequence_loss(config, logits, labels, num_items_in_batch=None):
    """Loss of one vector of logits per sequence, `(B, N)`; of packed rows B is the number of sequences.

    Single label: cross entropy against `(B,)` class numbers of any dtype. Multi-label: binary cross entropy against
    `(B, N)` zeros and ones, -100 for unknown. Regression: squared error against `(B,)` or `(B, N)` numbers.
    """
    problem_type = problem_type_of(config, logits, labels)
    if problem_type == "single_label_classification":
        if labels.numel() != logits.shape[0]:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)}, but there are {logits.shape[0]} sequences: "
                f"single_label_classification takes one class number a sequence, multi_label_classification takes "
                f"({logits.shape[0]}, {config.num_labels}) zeros and ones."
            )
        return cross_entropy_loss(logits, labels, num_items_in_batch)
    if labels.numel() != logits.numel():
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}, but problem_type {problem_type!r} with num_labels="
            f"{config.num_labels} takes {tuple(logits.shape)}."
        )
    logits = logits.to(at_least_fp32(logits.dtype))
    targets = labels.to(logits.device, logits.dtype).view_as(logits)
    if problem_type == "regression":
        total = (logits - targets).square().sum()
        return mean_over_items(total, torch.ones_like(targets), num_items_in_batch)
    items = targets != IGNORE_INDEX
    targets = targets.masked_fill(~items, 0.0)
    losses = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return mean_over_items(losses.masked_fill(~items, 0.0).sum(), items, num_items_in_batch)


__all__ = [
    "IGNORE_INDEX",
    "answer_labels",
    "check_indices",
    "check_label_shape",
    "cross_entropy_loss",
    "mean_over_items",
    "sequence_loss",
    "token_labels",
]
