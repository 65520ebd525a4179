"""Metrics that work offline: `evaluate.Metric` modules over scikit-learn and SciPy, and the F1 of whole entities.

They are used as `Accuracy().compute(predictions=..., references=...)`, or given to an evaluator: `metric=Accuracy()`;
`evaluate.load("accuracy")` would ask the Hub for its code. Labels may be numbers or names.

- Single label: `Accuracy`, `F1`, `MatthewsCorrelation`, or all three at once, `SingleLabelScores`.
- `MultiLabelF1` for rows of 0-1 flags, `SpearmanPearson` for scores, `SpanF1` for tags.
"""

import math
from collections.abc import Iterable, Sequence

import evaluate
import numpy as np
from datasets import Features, List, Value
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_INPUTS = """
Args:
    predictions: one for each row.
    references: the right answers, in the same order and form.
"""


def _features(*kinds) -> list[Features]:
    return [Features({"predictions": kind, "references": kind}) for kind in kinds]


class _OfflineMetric(evaluate.Metric):
    """A metric without files and without the Hub."""

    description = ""
    citation = ""
    forms: tuple = ()

    def __init__(self, *args, **kwargs):
        if kwargs.get("num_process", 1) == 1:
            kwargs.setdefault("keep_in_memory", True)
        super().__init__(*args, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.description,
            citation=self.citation,
            inputs_description=_INPUTS,
            features=_features(*self.forms),
        )


class _LabelMetric(_OfflineMetric):
    # Numbers first: "3" in a text column is the number 3 as well.
    forms = (Value("int64"), Value("string"))


class Accuracy(_LabelMetric):
    """Share of rows that are right."""

    description = "Share of rows whose predicted label is the right one."

    def _compute(self, predictions, references):
        return {"accuracy": float(accuracy_score(references, predictions))}


class F1(_LabelMetric):
    """Mean of the classes' F1 over the classes that occur, each of equal weight."""

    description = "F1 of each class, averaged over the classes that occur in predictions or references (macro)."

    def _compute(self, predictions, references):
        return {"f1": float(f1_score(references, predictions, average="macro", zero_division=0))}


class MatthewsCorrelation(_LabelMetric):
    """Correlation of predicted and right classes: 1 perfect, 0 no better than chance or always the same class."""

    description = "Matthews correlation coefficient, for two or more classes of any balance."

    def _compute(self, predictions, references):
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}


class SingleLabelScores(_LabelMetric):
    """Accuracy, macro F1 and Matthews correlation from one pass over the predictions."""

    description = "Accuracy, macro F1 and Matthews correlation."

    def _compute(self, predictions, references):
        parts = (Accuracy, F1, MatthewsCorrelation)
        return {name: value for part in parts for name, value in part._compute(self, predictions, references).items()}


class MultiLabelF1(_OfflineMetric):
    """F1 over labels of rows that have any number of them, and the share of rows with all of them right."""

    description = "Micro and macro F1 of 0-1 flags, a row of them for each text, and the share of exact rows."
    forms = (List(Value("int64")),)

    def _compute(self, predictions, references):
        predictions, references = np.asarray(predictions), np.asarray(references)
        return {
            "f1_micro": float(f1_score(references, predictions, average="micro", zero_division=0)),
            "f1_macro": float(f1_score(references, predictions, average="macro", zero_division=0)),
            "exact_match": float((predictions == references).all(axis=1).mean()),
        }


class SpearmanPearson(_OfflineMetric):
    """Rank and linear correlation of scores, and their mean squared error.

    A correlation with scores that are all equal does not exist; it is given as 0, so that the best checkpoint can be
    chosen.
    """

    description = "Spearman and Pearson correlation and mean squared error of scores."
    forms = (Value("float64"),)

    def _compute(self, predictions, references):
        predictions, references = np.asarray(predictions, float), np.asarray(references, float)
        scores = {"spearman": 0.0, "pearson": 0.0, "mse": float(np.mean((predictions - references) ** 2))}
        if len(predictions) > 1 and np.ptp(predictions) > 0 and np.ptp(references) > 0:
            scores["spearman"] = float(spearmanr(predictions, references).statistic)
            scores["pearson"] = float(pearsonr(predictions, references).statistic)
        return {name: value if math.isfinite(value) or name == "mse" else 0.0 for name, value in scores.items()}


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Give the entities of a row of tags as (kind, first word, last word).

    IOB2 and BIOES / BMES are read; as in the CoNLL script, an I-X that continues no X begins one.
    """
    found, kind, start = set(), None, 0
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if prefix == "O" and not name:
            name = None
        elif not name:
            prefix, name = "I", tag  # a tag without a prefix
        if kind is not None and (name != kind or prefix in ("B", "S")):
            found.add((kind, start, position - 1))
            kind = None
        if name is not None and kind is None:
            kind, start = name, position
        if kind is not None and prefix in ("E", "S"):
            found.add((kind, start, position))
            kind = None
    return found


class SpanF1(_OfflineMetric):
    """Precision, recall and F1 of whole entities (kind and both ends right), and the share of words tagged right."""

    description = "Entity-level precision, recall and F1 of tag rows (IOB2 or BIOES), and word accuracy."
    forms = (List(Value("string")),)

    def _compute(self, predictions, references):
        for row, (predicted, right) in enumerate(zip(predictions, references, strict=True)):
            if len(predicted) != len(right):
                raise ValueError(
                    f"row {row} has {len(predicted)} predicted tags for {len(right)} words; give one tag for each word"
                )
        predicted, right = _row_entities(predictions), _row_entities(references)
        hits = len(predicted & right)
        precision, recall = hits / max(len(predicted), 1), hits / max(len(right), 1)
        words = [p == r for ps, rs in zip(predictions, references, strict=True) for p, r in zip(ps, rs, strict=True)]
        return {
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / max(precision + recall, 1e-12),
            "accuracy": float(np.mean(words)) if words else 0.0,
        }


def _row_entities(rows: Iterable[Sequence[str]]) -> set[tuple]:
    return {(row, *entity) for row, tags in enumerate(rows) for entity in entities(tags)}
