"""The order of the training rows depends on seed and epoch, and on lengths where it should."""

import torch
from learner import text_rows

from modeling_dsx_encoder.epoch_order import EpochSampler, row_lengths


def test_order_depends_on_seed_and_epoch_alone():
    sampler = EpochSampler(50, seed=3)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        torch.rand(5)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(50)) == list(range(len(sampler)))
    assert list(EpochSampler(50, seed=4)) != orders[0]


def test_rows_of_like_length_come_together():
    lengths = torch.randint(3, 500, (400,)).tolist()
    order = list(EpochSampler(400, 0, lengths, group_size=8))
    assert sorted(order) == list(range(400))
    padded = sum(8 * max(lengths[row] for row in order[i : i + 8]) for i in range(0, 400, 8))
    assert padded < 1.1 * sum(lengths)


def test_lengths_are_read_or_counted():
    rows = text_rows(5)
    counted = row_lengths(rows, "length")
    assert counted == [len(row["input_ids"]) for row in rows] == row_lengths(list(rows), "length")
    assert row_lengths(rows.add_column("length", [1, 2, 3, 4, 5]), "length") == [1, 2, 3, 4, 5]
