"""The fine-tuning tasks: what a row's label is, which head learns it, and how it is scored.

A task turns labels into numbers (`label_map`, `encode`), says what the model's configuration gets (`config_kwargs`),
which Auto class builds it (`auto_class`), how rows become batches (`collator`) and what is measured (`metric`,
`compute_metrics`).
Pairs of texts are no task of their own: rows with `text_pair` work with every task on texts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import evaluate
import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
)

from .encoding import IGNORED
from .labels import (
    SEPARATOR,
    LabelMap,
    build_label_map,
    build_multi_label_map,
    build_tag_map,
    class_names,
    read_labels,
    split_labels,
)
from .metrics import MultiLabelF1, SingleLabelScores, SpanF1, SpearmanPearson


@dataclass(frozen=True)
class Task:
    """What the tasks on texts share; take one from `TASKS`."""

    name: str
    problem_type: str | None
    metric: Callable[[], evaluate.Metric]
    metric_for_best_model: str
    greater_is_better: bool = True
    auto_class: type = AutoModelForSequenceClassification
    label_column: str = "label"
    pipeline_name: str = "text-classification"

    def label_map(self, train: Dataset) -> LabelMap:
        """Number the labels of the training set; raises where there is nothing to tell apart."""
        raise NotImplementedError

    def encode(self, rows: Dataset, label_map: LabelMap, where: str = "data") -> list:
        """Give each row its label as the loss takes it; raises for labels that the map does not know."""
        raise NotImplementedError

    def config_kwargs(self, label_map: LabelMap) -> dict:
        """Give what the model's configuration has to say of the task."""
        kwargs = {"num_labels": len(label_map), "id2label": label_map.id2label, "label2id": label_map.label2id}
        return kwargs | ({"problem_type": self.problem_type} if self.problem_type else {})

    def collator(self, tokenizer: PreTrainedTokenizerBase, pad_to_multiple_of: int | None = None):
        """Give the collator that pads rows to a batch."""
        return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=pad_to_multiple_of)

    def decode(self, logits: np.ndarray, labels: np.ndarray, label_map: LabelMap) -> tuple[list, list]:
        """Turn logits and encoded labels into the predictions and references of the metric."""
        raise NotImplementedError

    def compute_metrics(self, label_map: LabelMap) -> Callable[[EvalPrediction], dict[str, float]]:
        """Give the function that Trainer calls with its predictions."""
        metric = self.metric()

        def compute(prediction: EvalPrediction) -> dict[str, float]:
            logits = prediction.predictions
            logits = logits[0] if isinstance(logits, tuple) else logits  # hidden states may follow
            predictions, references = self.decode(np.asarray(logits), np.asarray(prediction.label_ids), label_map)
            return metric.compute(predictions=predictions, references=references)

        return compute


@dataclass(frozen=True)
class SingleLabelClassification(Task):
    """One class for each text, or pair of texts."""

    name: str = "single_label"
    problem_type: str | None = "single_label_classification"
    metric: Callable[[], evaluate.Metric] = SingleLabelScores
    metric_for_best_model: str = "accuracy"

    def label_map(self, train: Dataset) -> LabelMap:
        """Number the classes of the training set; at least 2 must occur."""
        labels = read_labels(train, self.label_column)
        return build_label_map(labels, names=class_names(train, self.label_column))

    def encode(self, rows: Dataset, label_map: LabelMap, where: str = "data") -> list[int]:
        """Number the class of each row."""
        return label_map.encode(read_labels(rows, self.label_column), where)

    def decode(self, logits: np.ndarray, labels: np.ndarray, label_map: LabelMap) -> tuple[list, list]:
        """Take the class with the highest logit."""
        return logits.argmax(axis=-1).tolist(), labels.tolist()


@dataclass(frozen=True)
class MultiLabelClassification(Task):
    """Any number of labels for each text: lists, or cells such as 快递;质量."""

    name: str = "multi_label"
    problem_type: str | None = "multi_label_classification"
    metric: Callable[[], evaluate.Metric] = MultiLabelF1
    metric_for_best_model: str = "f1_micro"
    separator: str = SEPARATOR
    threshold: float = 0.5  # probability from which on a label is said to apply

    def _names(self, rows: Dataset) -> list[list[str]]:
        return [split_labels(cell, self.separator) for cell in read_labels(rows, self.label_column)]

    def label_map(self, train: Dataset) -> LabelMap:
        """Number every label that occurs."""
        return build_multi_label_map(self._names(train), names=class_names(train, self.label_column))

    def encode(self, rows: Dataset, label_map: LabelMap, where: str = "data") -> list[list[float]]:
        """Give each row a flag for each label."""
        flags = np.zeros((len(rows), len(label_map)))
        for row, numbers in enumerate(label_map.encode_rows(self._names(rows), where)):
            flags[row, numbers] = 1.0
        return flags.tolist()

    def decode(self, logits: np.ndarray, labels: np.ndarray, label_map: LabelMap) -> tuple[list, list]:
        """Take the labels whose probability reaches the threshold."""
        least = math.log(self.threshold / (1 - self.threshold))
        return (logits >= least).astype(int).tolist(), labels.astype(int).tolist()


@dataclass(frozen=True)
class Regression(Task):
    """A score for each text, or pair of texts."""

    name: str = "regression"
    problem_type: str | None = "regression"
    metric: Callable[[], evaluate.Metric] = SpearmanPearson
    metric_for_best_model: str = "spearman"

    def label_map(self, train: Dataset) -> LabelMap:
        """Name the one output."""
        return LabelMap(("score",))

    def encode(self, rows: Dataset, label_map: LabelMap, where: str = "data") -> list[float]:
        """Read each score as a number."""
        scores = []
        for row, value in enumerate(read_labels(rows, self.label_column)):
            try:
                scores.append(float(value))
            except (TypeError, ValueError):
                scores.append(math.nan)
            if not math.isfinite(scores[-1]):
                raise ValueError(
                    f"label {value!r} in row {row} of {where} is no finite number, which the task regression takes; "
                    "correct the row, or choose the task single_label"
                )
        return scores

    def decode(self, logits: np.ndarray, labels: np.ndarray, label_map: LabelMap) -> tuple[list, list]:
        """Take the output as it is."""
        return logits.reshape(len(labels)).tolist(), labels.tolist()


@dataclass(frozen=True)
class TokenClassification(Task):
    """A tag for each word: named entities and the like."""

    name: str = "token"
    problem_type: str | None = None
    metric: Callable[[], evaluate.Metric] = SpanF1
    metric_for_best_model: str = "f1"
    auto_class: type = AutoModelForTokenClassification
    label_column: str = "ner_tags"
    pipeline_name: str = "token-classification"

    def label_map(self, train: Dataset) -> LabelMap:
        """Number the tags, O first."""
        return build_tag_map(read_labels(train, self.label_column), names=class_names(train, self.label_column))

    def encode(self, rows: Dataset, label_map: LabelMap, where: str = "data") -> list[list[int]]:
        """Number the tags of each row's words."""
        tags = read_labels(rows, self.label_column)
        for row, (words, row_tags) in enumerate(zip(rows["tokens"], tags, strict=True)):
            if len(words) != len(row_tags):
                raise ValueError(
                    f"row {row} of {where} has {len(words)} tokens but {len(row_tags)} ner_tags; give one tag for each"
                )
        return label_map.encode_rows(tags, where)

    def collator(self, tokenizer: PreTrainedTokenizerBase, pad_to_multiple_of: int | None = None):
        """Give the collator that pads the labels too."""
        return DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=pad_to_multiple_of)

    def decode(self, logits: np.ndarray, labels: np.ndarray, label_map: LabelMap) -> tuple[list, list]:
        """Name the tags of the tokens that have a label: the first piece of each word."""
        numbers, kept = logits.argmax(axis=-1), labels != IGNORED
        names = label_map.names
        predictions = [[names[n] for n in row[mask]] for row, mask in zip(numbers, kept, strict=True)]
        references = [[names[n] for n in row[mask]] for row, mask in zip(labels, kept, strict=True)]
        return predictions, references


TASKS: dict[str, Task] = {
    task.name: task
    for task in (SingleLabelClassification(), MultiLabelClassification(), Regression(), TokenClassification())
}
