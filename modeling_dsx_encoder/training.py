"""Training through transformers' Trainer, with what it gets wrong put right.

- `DsxTrainer`: evaluation loss = sum over items / number of items, whatever the batch size and number of processes; an
  order of the rows that depends on seed and epoch alone, so that a resumed run and a run on more processes see the
  batches of the unbroken, single one; evaluation takes no random numbers from training; `predict` keeps the order and
  gives one row an example, for padded and for flattened batches (`FlatteningCollator`)
- `parameter_groups`: no weight decay on biases, norms and position tables
- `build_trainer`: a DsxTrainer with the callbacks that every run wants
- `prepare_run`, `save_finished`, `last_checkpoint` (from runs.py), `NonFiniteCallback` (from non_finite.py)

Schedules (`lr_scheduler_type`: linear, cosine, inverse_sqrt; `warmup_steps`: steps, or a ratio below 1), gradient
clipping (`max_grad_norm`), accumulation and precision are transformers' own.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler, SequentialSampler
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import get_parameter_names

from .batches import RepeatedRows, first_rows, item_labels, num_rows, one_row_each, packed_lengths
from .epoch_order import EpochCallback, EpochSampler, row_lengths
from .losses_dsx_encoder import IGNORE_INDEX
from .non_finite import NonFiniteCallback, NonFiniteError
from .runs import last_checkpoint, prepare_run, save_finished

# Biases, norms and tables of positions are few numbers that say where or how much: decay only pulls them off.
NO_DECAY_PATTERNS = (
    r"bias",
    r"(?:^|\.|_)norm(?:$|\.)",
    r"layernorm",
    r"rmsnorm",
    r"(?:^|\.)positions(?:$|\.)",
    r"position_embeddings",
)


def decayed_names(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay works on."""
    return get_parameter_names(model, [nn.LayerNorm, nn.RMSNorm], list(NO_DECAY_PATTERNS))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: trainable parameters with and without weight decay."""
    decayed = set(decayed_names(model))
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]


class DsxTrainer(Trainer):
    """transformers' Trainer with exact evaluation losses and an order of rows that survives anything."""

    def __init__(self, *args, **kwargs):
        self.train_sampler = None
        self._eval_parts: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        super().__init__(*args, **kwargs)
        self._keep_batches_whole()
        self.add_callback(EpochCallback(self))

    def _keep_batches_whole(self) -> None:
        """Lets every process make its own batches, also of a stream: accelerate's dispatcher cuts by first axes.

        The first axis of a flattened batch is 1, whatever the number of its texts.
        """
        config = self.accelerator.dataloader_config
        if config.dispatch_batches and isinstance(self.data_collator, DataCollatorWithFlattening):
            raise ValueError(
                "dispatch_batches=True would cut flattened batches after their first row: leave it out of "
                "accelerator_config, or use a collator that pads"
            )
        config.dispatch_batches = bool(config.dispatch_batches)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Leaves tables of positions without decay too."""
        return decayed_names(model)

    def _get_train_sampler(self, train_dataset=None) -> Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        strategy = self.args.train_sampling_strategy
        if strategy not in ("random", "group_by_length") or not hasattr(dataset, "__len__"):
            return super()._get_train_sampler(dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        lengths = row_lengths(dataset, self.args.length_column_name) if strategy == "group_by_length" else None
        rows_per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        self.train_sampler = EpochSampler(len(dataset), seed, lengths, rows_per_step)
        return self.train_sampler

    def _get_eval_sampler(self, eval_dataset) -> Sampler | None:
        # Grouped by length, `evaluate` and `predict` would give the rows back in another order.
        return SequentialSampler(eval_dataset) if hasattr(eval_dataset, "__len__") else None

    # ---- losses ----

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Takes the rows out that accelerate repeats, at the end of an epoch, to give each process a full batch."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            own = self._own_part(batches[-1])
            if own is not batches[-1]:
                batches[-1] = own
                num_items = self._get_num_items_in_batch(batches, device)
        return batches, num_items

    def _own_part(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The batch without rows that were there before; with at least one, so that all processes make a forward."""
        labels = self._labels_of(inputs)
        rows = 0 if labels is None else num_rows(inputs, labels)
        own_rows = self._own_rows(rows) if rows else None
        if own_rows is None:
            return inputs
        return (dict if own_rows else RepeatedRows)(first_rows(inputs, rows, max(own_rows, 1)))

    def _labels_of(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        return item_labels(inputs, self.accelerator.unwrap_model(self.model))

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device):
        if not batch_samples or self._labels_of(batch_samples[0]) is None:
            return super()._get_num_items_in_batch(batch_samples, device)
        batches = [{"labels": self._labels_of(batch)} for batch in batch_samples]
        num_items = super()._get_num_items_in_batch(batches, device)
        # Where nothing is masked the loss is 0, not 0 / 0.
        return num_items.clamp(min=1) if isinstance(num_items, torch.Tensor) else num_items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """During `evaluate` and `predict`, notes sum and number of items of each batch besides."""
        if isinstance(inputs, RepeatedRows):
            result = super().compute_loss(model, dict(inputs), return_outputs, num_items_in_batch)
            return (result[0] * 0.0, result[1]) if return_outputs else result * 0.0
        labels = self._labels_of(inputs)
        if self._eval_parts is None or labels is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, dict(inputs), return_outputs=True)
        own = self._own_part(inputs)
        own_loss = loss if own is inputs else super().compute_loss(model, dict(own))
        self._note_loss(own_loss, self._labels_of(own))
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Gives one row an example where a batch is flattened, padded with -100 as Trainer pads."""
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        lengths = packed_lengths(inputs)
        if lengths is None:
            return loss, logits, labels
        if "inputs" in self.args.include_for_metrics:
            raise ValueError(
                f"include_for_metrics={self.args.include_for_metrics} asks for the inputs, of which a flattened batch "
                "has one row for all texts; leave 'inputs' out, or evaluate with a collator that pads."
            )
        return loss, one_row_each(logits, lengths), one_row_each(labels, lengths)

    def _note_loss(self, mean_loss: torch.Tensor, labels: torch.Tensor) -> None:
        num_items = labels.ne(IGNORE_INDEX).sum()
        total = mean_loss.detach().float() * num_items
        self._eval_parts.append((torch.where(num_items > 0, total, torch.zeros_like(total)), num_items))

    def _own_rows(self, num_rows: int) -> int | None:
        """Rows of this process's last batch that are not there for the second time to fill it up; None for all."""
        loader = self.accelerator.gradient_state
        if self.accelerator.num_processes == 1 or not loader.end_of_dataloader or loader.remainder <= 0:
            return None
        return min(max(loader.remainder - self.accelerator.process_index * num_rows, 0), num_rows)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """Replaces the mean of batch means by the mean over items, and gives training its random state back."""
        self._eval_parts = []
        try:
            with torch.random.fork_rng(devices=[]):
                output = super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
            if self._eval_parts:
                output.metrics[f"{metric_key_prefix}_loss"] = self._mean_over_items()
        finally:
            self._eval_parts = None
        return output

    def _mean_over_items(self) -> float:
        totals, counts = zip(*self._eval_parts, strict=True)
        sums = torch.stack([torch.stack(totals).double().cpu().sum(), torch.stack(counts).double().cpu().sum()])
        if self.accelerator.num_processes > 1:
            sums = self.accelerator.reduce(sums.to(self.args.device), "sum")
        return (sums[0] / sums[1].clamp(min=1)).item()

    # ---- checkpoints ----

    def _save_checkpoint(self, model, trial):
        # The trainer's state is written last: without it a folder counts as unfinished (`last_checkpoint`).
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)


def build_trainer(
    model: nn.Module,
    args: TrainingArguments,
    *,
    train_dataset=None,
    eval_dataset=None,
    tokenizer=None,
    collator=None,
    compute_metrics=None,
    callbacks: Sequence[TrainerCallback] = (),
) -> DsxTrainer:
    """A DsxTrainer that stops at the first non-finite loss or gradient."""
    return DsxTrainer(
        model,
        args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=compute_metrics,
        callbacks=[NonFiniteCallback(), *callbacks],
    )


def use_task_metric(args: TrainingArguments, task) -> None:
    """The best checkpoint is the best by the task's metric, unless the recipe names another one (eval_loss, ...)."""
    if args.load_best_model_at_end and args.metric_for_best_model in (None, "loss"):
        args.metric_for_best_model = task.metric_for_best_model
        args.greater_is_better = task.greater_is_better


def evaluate_splits(trainer: Trainer, splits: Mapping[str, Any]) -> dict[str, float]:
    """Losses and metrics of each split, under eval_ for validation and test_ for test; printed too."""
    metrics = {}
    for name, rows in splits.items():
        prefix = "eval" if name == "validation" else name
        found = trainer.evaluate(rows, metric_key_prefix=prefix)
        if trainer.compute_metrics is None:
            found[f"{prefix}_perplexity"] = math.exp(min(found[f"{prefix}_loss"], 700.0))
        trainer.log_metrics(prefix, found)
        metrics |= found
    return metrics


__all__ = [
    "DsxTrainer",
    "EpochSampler",
    "NonFiniteCallback",
    "NonFiniteError",
    "build_trainer",
    "evaluate_splits",
    "last_checkpoint",
    "parameter_groups",
    "prepare_run",
    "save_finished",
    "use_task_metric",
]
