"""What a batch holds, padded or flattened: rows, items, and the first rows alone."""

import pytest
import torch
from tiny import HEADS, tiny_config

from modeling_dsx_encoder.batches import (
    RepeatedRows,
    first_rows,
    item_labels,
    num_rows,
    one_row_each,
    packed_lengths,
)
from modeling_dsx_encoder.flattening import FlatteningCollator

LENGTHS = [3, 1, 4]


def flattened(collator=None, **columns):
    features = [
        {"input_ids": [5] * length, **{name: values[row] for name, values in columns.items()}}
        for row, length in enumerate(LENGTHS)
    ]
    return (collator or FlatteningCollator(return_flash_attn_kwargs=True))(features)


def test_lengths_are_read_from_edges_or_positions():
    batch = flattened()
    assert packed_lengths(batch) == LENGTHS
    for missing in ("cu_seq_lens_q", "position_ids"):
        rest = {name: value for name, value in batch.items() if name != missing}
        assert packed_lengths(rest) == LENGTHS
        assert packed_lengths(rest | {"attention_mask": torch.ones(1, 8)}) == LENGTHS
    assert packed_lengths({"input_ids": batch["input_ids"]}) is None


def test_other_batches_have_no_packed_lengths():
    ids, positions = torch.full((2, 4), 5), torch.arange(4).expand(2, 4)
    assert packed_lengths({"input_ids": ids, "position_ids": positions}) is None
    padding = torch.tensor([[1, 1, 0, 0]])
    assert packed_lengths({"input_ids": ids[:1], "position_ids": positions[:1], "attention_mask": padding}) is None
    assert packed_lengths({"inputs_embeds": torch.zeros(1, 4, 2)}) is None
    assert packed_lengths({"input_ids": ids[None], "position_ids": positions[None]}) is None


@pytest.mark.parametrize("labels", [[0, 2, 1], [[1.0, 0.0]] * 3, [[1] * length for length in LENGTHS]])
def test_first_rows_of_a_flattened_batch_are_a_flattened_batch(labels):
    batch = flattened(labels=labels)
    assert num_rows(batch, batch["labels"]) == 3
    for keep in (1, 2, 3):
        features = [{"input_ids": [5] * n, "labels": label} for n, label in zip(LENGTHS, labels, strict=True)]
        expected = FlatteningCollator(return_flash_attn_kwargs=True)(features[:keep])
        found = first_rows(batch, 3, keep)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def test_first_rows_of_a_padded_batch():
    batch = {"input_ids": torch.zeros(4, 7), "labels": torch.arange(4), "scale": torch.tensor(2.0), "name": "a"}
    found = first_rows(batch, 4, 3)
    assert found["input_ids"].shape == (3, 7)
    assert found["labels"].tolist() == [0, 1, 2]
    assert (found["scale"], found["name"]) == (batch["scale"], "a")


def test_one_row_each_pads_what_was_flat():
    tokens, texts = torch.arange(16.0).view(1, 8, 2), torch.zeros(3, 5)
    found, same = one_row_each((tokens, texts), LENGTHS)
    assert same is texts
    assert found.shape == (3, 4, 2)
    assert torch.equal(found[2], tokens[0, 4:])
    assert torch.equal(found[0, :3], tokens[0, :3])
    assert (found[0, 3] == -100).all()
    assert one_row_each(None, LENGTHS) is None


def items(batch, name, **fields):
    return item_labels(batch, HEADS[name](tiny_config(**fields)))


def test_items_of_each_loss():
    assert items(flattened(labels=[0, 2, 1]), "sequence").tolist() == [0, 2, 1]
    assert items(flattened(labels=[-100.0, 2.0, 1.0]), "sequence", num_labels=1).tolist() == [0, 0, 0]
    tags = flattened(labels=[[1, -100, 2], [0], [1] * 4])
    assert items(tags, "token").ne(-100).sum() == 7
    # The first answer is past its own text, though not past the row.
    places = {"start_positions": [3, 0, 3], "end_positions": [3, 0, 3]}
    assert items(flattened(**places), "question").tolist() == [-100, 0, 3]
    assert items(flattened(), "token") is None
    assert items(RepeatedRows(tags), "token").eq(-100).all()


def test_labels_on_padding_are_no_items():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    batch = {"input_ids": mask, "attention_mask": mask, "labels": torch.ones(2, 3, dtype=torch.uint8)}
    assert items(batch, "token").tolist() == [[1, 1, -100], [-100, 1, 1]]
    assert items(batch, "masked_lm").ne(-100).sum() == 4
    # As many flags as columns: these belong to the row.
    assert items(batch, "sequence").ne(-100).sum() == 6
