"""Tiny trainers for tests: rows of random tokens, one kind of loss each, no dropout."""

import torch
from datasets import Dataset
from tiny import HEADS, tiny_config
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding, set_seed

from modeling_dsx_encoder.flattening import FlatteningCollator
from modeling_dsx_encoder.recipe import DsxTrainingArguments
from modeling_dsx_encoder.training import build_trainer

DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1}


def arguments(folder, **options):
    plain = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    plain |= {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "num_train_epochs": 2}
    return DsxTrainingArguments(str(folder), **(plain | options))


def text_rows(num_rows, longest=40, seed=0, **columns):
    """Rows of random tokens, 3 to `longest` of them; a column is made by a function of length and generator."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        length = int(torch.randint(3, longest + 1, (), generator=generator))
        tokens = torch.randint(5, 99, (length,), generator=generator).tolist()
        row = {"input_ids": tokens, "attention_mask": [1] * length}
        rows.append(row | {name: make(length, generator) for name, make in columns.items()})
    return Dataset.from_list(rows)


def whole(high):
    return lambda length, generator: int(torch.randint(0, high, (), generator=generator))


def place(length, generator):
    """A place in the row; answers of some rows were cut off, which puts them on padding or past the batch."""
    return length + 1 if length % 4 == 0 else int(torch.randint(0, 3, (), generator=generator))


def number(length, generator):
    return float(torch.randn((), generator=generator))


def flags(length, generator):
    return torch.randint(0, 2, (3,), generator=generator).float().tolist()


def tags(length, generator):
    chosen = torch.randint(0, 3, (length,), generator=generator)
    return torch.where(torch.rand(length, generator=generator) < 0.4, chosen, -100).tolist()


# name: head, problem type, number of labels, what makes the labels of a row
LOSSES = {
    "single_label": ("sequence", "single_label_classification", 3, whole(3)),
    "multi_label": ("sequence", "multi_label_classification", 3, flags),
    "regression": ("sequence", "regression", 1, number),
    "regression_unsaid": ("sequence", None, 1, number),
    "token": ("token", None, 3, tags),
    "masked_lm": ("masked_lm", None, 2, tags),
    "question": ("question", None, 2, None),
}


def learner(name, folder, tokenizer, num_rows=8, longest=20, dataset=None, flatten=False, **options):
    """A trainer without dropout for one kind of loss; its collator pads, or flattens."""
    head, problem_type, num_labels, make = LOSSES[name]
    columns = {"labels": make} if make else {"start_positions": place, "end_positions": place}
    rows = text_rows(num_rows, longest, **columns) if dataset is None else dataset
    set_seed(0)
    model = HEADS[head](tiny_config(problem_type=problem_type, num_labels=num_labels))
    by_token = name in ("token", "masked_lm")
    padding = DataCollatorForTokenClassification if by_token else DataCollatorWithPadding
    collator = FlatteningCollator(return_flash_attn_kwargs=True) if flatten else padding(tokenizer)
    return build_trainer(model, arguments(folder, **options), train_dataset=rows, eval_dataset=rows, collator=collator)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
