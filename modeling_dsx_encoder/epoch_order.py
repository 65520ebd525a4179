"""The order of the training rows: a function of seed and epoch alone.

- `EpochSampler`: the same order on every process, whatever their number, and after every resume
- `EpochCallback`: tells sampler and collator which epoch begins
"""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import get_length_grouped_indices


class EpochSampler(Sampler):
    """Order of the rows as a function of seed and epoch, on every process and after every resume the same.

    transformers' LengthGroupedSampler draws from the global generator: its order is lost when a run is resumed, and
    differs between processes as soon as they drew different numbers.

    Args:
        num_rows: Rows of the data set.
        seed: Any int; epoch e of one seed never repeats epoch e' of another.
        lengths: Tokens of each row; given, rows of like length come together, so that little is padded.
        group_size: Rows in one optimiser step over all processes; rows are sorted within 50 of them.
    """

    def __init__(self, num_rows: int, seed: int, lengths: Sequence[int] | None = None, group_size: int = 1):
        self.num_rows = num_rows
        self.seed = seed
        self.lengths = lengths
        self.group_size = group_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed << 24) + self.epoch)
        if self.lengths is None:
            return iter(torch.randperm(self.num_rows, generator=generator).tolist())
        return iter(get_length_grouped_indices(self.lengths, self.group_size, generator=generator))


class EpochCallback(TrainerCallback):
    """Tells the sampler and the collator (masks!) which epoch begins, in a resumed run too.

    DsxTrainer has it; another Trainer with our collator needs `trainer.add_callback(EpochCallback(trainer))`.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        """`state.epoch` is a fraction in the middle of an epoch, whole at its ends."""
        for part in (getattr(self.trainer, "train_sampler", None), self.trainer.data_collator):
            if hasattr(part, "set_epoch"):
                part.set_epoch(int(state.epoch or 0))


def row_lengths(dataset, length_column: str) -> list[int]:
    """Tokens of each row, from the length column where there is one, or counted."""
    columns = getattr(dataset, "column_names", [])
    if length_column in columns:
        return list(dataset[length_column])
    rows = dataset.select_columns("input_ids") if "input_ids" in columns else dataset
    return [len(row["input_ids"]) for row in rows]
