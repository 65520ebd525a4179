"""Batches without padding: the texts of a batch laid end to end in one row.

- `FlatteningCollator`: rows to one packed row, with one label a text, one a token, or the place of an answer. The
  encoder keeps the texts apart and its heads give one row of logits for each.
"""

from typing import Any, Literal

import torch
from transformers import DataCollatorWithFlattening

LABEL_KEYS = ("labels", "label", "label_ids")


class FlatteningCollator(DataCollatorWithFlattening):
    """Lay the rows of a batch end to end: `input_ids` and `position_ids` `(1, T)`, T = tokens of all rows.

    The class that it extends takes labels of tokens only and writes -100 over the first of each text, a rule of causal
    language models. Here `labels` (in the rows: `labels`, `label` or `label_ids`) are

    - one a text: a class number, a number, or a list of flags; `(rows, ...)`
    - one a token: a list as long as `input_ids`, all kept; `(1, T)`

    `start_positions` and `end_positions` `(rows,)` stay places in their own text. `token_type_ids` become `(1, T)`.
    Positions are counted anew, and other columns are left out.

    Args:
        args: As for `DataCollatorWithFlattening`: `return_flash_attn_kwargs` adds `cu_seq_lens_q`, `cu_seq_lens_k`,
            `max_length_q` and `max_length_k`, `return_seq_idx` adds `seq_idx`.
        labels_per: "text" or "token"; by default lists of whole numbers as long as the row are labels of tokens.

    Raises:
        ValueError: An option that would hide from the encoder where a text begins, or a row that cannot be flattened.
    """

    def __init__(self, *args, labels_per: Literal["text", "token"] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        if labels_per not in (None, "text", "token"):
            raise ValueError(f"labels_per is {labels_per!r}, but it is 'text', 'token' or None, which looks at them")
        if self.position_ids_start != 0:
            raise ValueError(
                f"position_ids_start is {self.position_ids_start}, but the DSX encoder counts from 0, where a text "
                "begins; rows of a table that are left out in front belong in config.position_offset"
            )
        if not (self.return_position_ids or self.return_flash_attn_kwargs):
            raise ValueError(
                "return_position_ids=False leaves nothing that tells the texts of a row apart; set "
                "return_flash_attn_kwargs=True, or leave the positions in"
            )
        self.labels_per = labels_per

    def __call__(self, features, return_tensors=None, separator_id=None) -> dict[str, Any]:
        """Make one batch."""
        if (return_tensors or self.return_tensors) != "pt":
            raise ValueError(f"return_tensors is {return_tensors or self.return_tensors!r}; only 'pt' is made here")
        input_ids = _column(features, "input_ids")
        if input_ids is None:
            raise ValueError(f"the rows hold {sorted(features[0])}, but flattening takes input_ids; tokenise first")
        for row, tokens in enumerate(input_ids):
            if not tokens:
                raise ValueError(
                    f"row {row} of the batch has no token, so that its label would belong to no text; leave empty "
                    "rows out, or tokenise with special tokens"
                )
        for row, mask in enumerate(_column(features, "attention_mask") or ()):
            if 0 in mask:
                raise ValueError(
                    f"row {row} of the batch is padded already; tokenise without padding, which flattening spares"
                )
        batch = super().__call__([{"input_ids": tokens} for tokens in input_ids])
        del batch["labels"]  # the next token, for causal language models
        for name in ("token_type_ids", "start_positions", "end_positions"):
            values = _column(features, name)
            if values is not None:
                values = values if name != "token_type_ids" else [_end_to_end(values, input_ids, name)]
                batch[name] = torch.tensor(values)
        for name in LABEL_KEYS:
            values = _column(features, name)
            if values is not None:
                is_by_token = self._is_by_token(values, input_ids)
                batch["labels"] = torch.tensor([_end_to_end(values, input_ids, name)] if is_by_token else values)
                break
        return batch

    def _is_by_token(self, labels: list, input_ids: list[list[int]]) -> bool:
        if self.labels_per is not None:
            return self.labels_per == "token"
        return all(
            isinstance(row, list) and len(row) == len(tokens) and not any(isinstance(label, float) for label in row)
            for row, tokens in zip(labels, input_ids, strict=True)
        )


def _column(features: list[dict], name: str) -> list | None:
    """A column of the batch as Python values; None when no row has it."""
    values = [row.get(name) for row in features]
    missing = [row for row, value in enumerate(values) if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        raise ValueError(f"row {missing[0]} of the batch has no {name}, but others have; give it in every row or none")
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


def _end_to_end(values: list, input_ids: list[list[int]], name: str) -> list:
    for row, (value, tokens) in enumerate(zip(values, input_ids, strict=True)):
        if not isinstance(value, list) or len(value) != len(tokens):
            found = f"{len(value)} values" if isinstance(value, list) else repr(value)
            raise ValueError(
                f"{name} of row {row} is {found}, but its text has {len(tokens)} tokens; give one for each"
            )
    return [item for value in values for item in value]
