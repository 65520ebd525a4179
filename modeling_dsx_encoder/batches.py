"""What a batch holds, padded or flattened: its rows, the items of its loss, and its first rows alone.

A row is an example of the data set. A flattened batch is one packed row `(1, T)` of several of them.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map

from .losses_dsx_encoder import IGNORE_INDEX, answer_labels


class RepeatedRows(dict):
    """A batch of which this process owns no row: it goes through the model, as the others wait, and counts nothing."""


def packed_lengths(inputs: Mapping[str, Any]) -> list[int] | None:
    """Tokens of each text in a flattened batch: `input_ids` `(1, T)` without padding, and where texts begin.

    None for any other batch.
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None or ids.dim() != 2 or len(ids) != 1 or (mask is not None and not bool((mask != 0).all())):
        return None
    edges, positions = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if edges is not None:
        return torch.as_tensor(edges).diff().tolist()
    if positions is None:
        return None
    begins = (positions.flatten() == 0).nonzero().flatten().tolist()
    edges = [0, *(place for place in begins if place), ids.shape[1]]
    return [end - begin for begin, end in pairwise(edges)]


def num_rows(inputs: Mapping[str, Any], labels: torch.Tensor) -> int:
    """Examples in a batch with these labels."""
    lengths = packed_lengths(inputs)
    return len(labels) if lengths is None else len(lengths)


def first_rows(inputs: Mapping[str, Any], rows: int, keep: int) -> dict[str, Any]:
    """The first `keep` of a batch's examples."""
    lengths = packed_lengths(inputs)
    total, kept = (None, None) if lengths is None else (sum(lengths), sum(lengths[:keep]))

    def cut(name, value):
        if lengths is not None and name in ("max_length_q", "max_length_k"):
            return max(lengths[:keep])
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        if lengths is not None and name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            return value[: keep + 1]
        if lengths is not None and value.shape[:2] == (1, total):
            return value[:, :kept]
        return value[:keep] if len(value) == rows else value

    return {name: cut(name, value) for name, value in inputs.items()}


def one_row_each(values: Any, lengths: list[int]) -> Any:
    """What a flattened batch gave for its tokens, `(1, T, ...)`, as `(rows, longest, ...)` with -100 past the ends.

    Values `(rows, ...)` and nested ones are looked through and stay.
    """

    def split(value):
        if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, sum(lengths)):
            return value
        return pad_sequence(value[0].split(lengths), batch_first=True, padding_value=IGNORE_INDEX)

    return tree_map(split, values)


def item_labels(inputs: Mapping[str, Any], model: nn.Module) -> torch.Tensor | None:
    """A tensor whose entries other than -100 are the items of the loss; None without labels."""
    labels, mask = inputs.get("labels"), inputs.get("attention_mask")
    mask = mask if mask is not None and mask.dim() == 2 else None
    if labels is None and "start_positions" in inputs and "end_positions" in inputs:
        length, lengths = inputs["input_ids"].shape[1], packed_lengths(inputs)
        if lengths is not None:
            length = max(lengths)
            ends = torch.tensor(lengths, device=inputs["input_ids"].device)
            mask = torch.arange(length, device=ends.device) < ends[:, None]  # (rows, longest)
        labels = answer_labels(inputs["start_positions"], inputs["end_positions"], length, mask)[0]
    if labels is None:
        return None
    if isinstance(inputs, RepeatedRows):
        return torch.full_like(labels, IGNORE_INDEX)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
    if type(model).__name__.endswith(("ForMaskedLM", "ForTokenClassification")):
        # A label on padding is no item.
        return labels if mask is None else labels.long().masked_fill(mask.to(labels.device) == 0, IGNORE_INDEX)
    # In a regression -100 is a target like any other.
    problem_type = getattr(model.config, "problem_type", None)
    is_number_a_row = model.config.num_labels == 1 and labels.numel() == labels.shape[0]
    is_regression = problem_type == "regression" or (problem_type is None and is_number_a_row)
    return torch.zeros_like(labels) if is_regression else labels
