"""Metrics against values worked out by hand, and through `evaluate.evaluator`, offline."""

import numpy as np
import pytest
from datasets import Dataset
from evaluate.evaluator import TextClassificationEvaluator

from modeling_dsx_encoder.metrics import (
    F1,
    Accuracy,
    MatthewsCorrelation,
    MultiLabelF1,
    SingleLabelScores,
    SpanF1,
    SpearmanPearson,
    entities,
)


@pytest.mark.parametrize("names", [(0, 1, 2), ("中性", "正面", "负面"), ("0", "1", "2")])
def test_single_label_metrics(names):
    right = [names[n] for n in (0, 0, 1, 1, 2)]
    predicted = [names[n] for n in (0, 1, 1, 1, 0)]
    assert Accuracy().compute(predictions=predicted, references=right) == {"accuracy": 0.6}
    # F1: class 0 has 1 hit of 2 predicted and 2 right = 0.5; class 1 2 of 3 and 2 = 0.8; class 2 = 0
    assert F1().compute(predictions=predicted, references=right)["f1"] == pytest.approx((0.5 + 0.8) / 3)
    scores = SingleLabelScores().compute(predictions=predicted, references=right)
    assert set(scores) == {"accuracy", "f1", "matthews_correlation"}
    assert scores["accuracy"] == 0.6


def test_matthews_correlation():
    compute = MatthewsCorrelation().compute
    assert compute(predictions=[0, 1, 1, 0], references=[0, 1, 1, 0]) == {"matthews_correlation": 1.0}
    assert compute(predictions=[1, 1, 1, 1], references=[0, 1, 1, 0]) == {"matthews_correlation": 0.0}
    # TP 1, TN 1, FP 1, FN 1
    assert compute(predictions=[1, 0, 1, 0], references=[1, 0, 0, 1]) == {"matthews_correlation": 0.0}


def test_batches_can_be_added():
    metric = Accuracy()
    metric.add_batch(predictions=[1, 0], references=[1, 1])
    metric.add_batch(predictions=[1, 1], references=[1, 1])
    assert metric.compute() == {"accuracy": 0.75}


def test_multi_label_metrics():
    right, predicted = [[1, 0, 1], [0, 1, 0], [0, 0, 0]], [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    scores = MultiLabelF1().compute(predictions=predicted, references=right)
    assert scores["f1_micro"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert scores["f1_macro"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert scores["exact_match"] == pytest.approx(2 / 3)


def test_correlations():
    scores = SpearmanPearson().compute(predictions=[1.0, 2.0, 3.0, 10.0], references=[0.5, 1.0, 1.5, 2.0])
    assert scores["spearman"] == pytest.approx(1.0)
    assert scores["pearson"] == pytest.approx(np.corrcoef([1, 2, 3, 10], [0.5, 1, 1.5, 2])[0, 1])
    assert scores["mse"] == pytest.approx((0.25 + 1 + 2.25 + 64) / 4)
    for predictions in ([2.0, 2.0], [2.0]):
        flat = SpearmanPearson().compute(predictions=predictions, references=[1.0, 3.0][: len(predictions)])
        assert (flat["spearman"], flat["pearson"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-PER I-PER O B-LOC", {("PER", 1, 2), ("LOC", 4, 4)}),
        ("B-PER B-PER I-PER", {("PER", 0, 0), ("PER", 1, 2)}),
        ("I-PER I-LOC", {("PER", 0, 0), ("LOC", 1, 1)}),  # an I that continues nothing begins
        ("B-PER I-LOC I-LOC", {("PER", 0, 0), ("LOC", 1, 2)}),
        ("S-PER S-PER B-LOC M-LOC E-LOC I-LOC", {("PER", 0, 0), ("PER", 1, 1), ("LOC", 2, 4), ("LOC", 5, 5)}),
        ("PER PER O PER", {("PER", 0, 1), ("PER", 3, 3)}),
        ("B-creative-work I-creative-work", {("creative-work", 0, 1)}),
        ("O O", set()),
        ("", set()),
    ],
)
def test_entities(tags, found):
    assert entities(tags.split()) == found


def test_span_f1_counts_whole_entities():
    right = [["B-PER", "I-PER", "O"], ["B-LOC", "O", "B-LOC"]]
    predicted = [["B-PER", "O", "O"], ["B-LOC", "O", "B-PER"]]
    scores = SpanF1().compute(predictions=predicted, references=right)
    assert scores == pytest.approx({"precision": 1 / 3, "recall": 1 / 3, "f1": 1 / 3, "accuracy": 4 / 6})
    nothing = SpanF1().compute(predictions=[["O"]], references=[["O"]])
    assert nothing == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 1.0}


def test_span_f1_needs_a_tag_for_each_word():
    with pytest.raises(ValueError, match="row 1 has 1 predicted tags for 2 words"):
        SpanF1().compute(predictions=[["O"], ["O"]], references=[["O"], ["O", "O"]])


def test_metrics_leave_no_file(tmp_path):
    Accuracy(cache_dir=str(tmp_path)).compute(predictions=[1], references=[1])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class FakePipeline:
    """Answers as a text-classification pipeline does, without a model."""

    task = "text-classification"

    def __call__(self, inputs, **kwargs):
        return [{"label": "正面" if "好" in row["text"] else "负面", "score": 1.0} for row in inputs]


@pytest.mark.parametrize("mapping", [None, {"负面": 0, "正面": 1}])
def test_evaluator_takes_the_metrics(mapping, monkeypatch):
    names = ["正面", "负面", "正面"]
    data = Dataset.from_dict({"text": ["好", "坏", "差"], "label": [mapping[n] for n in names] if mapping else names})
    # evaluate 0.4 looks for TensorFlow classes that transformers 5 has not, before it sees that a pipeline is there
    monkeypatch.setattr("transformers.TFPreTrainedModel", type(None), raising=False)
    scores = TextClassificationEvaluator().compute(
        model_or_pipeline=FakePipeline(), data=data, metric=SingleLabelScores(), label_mapping=mapping
    )
    assert scores["accuracy"] == pytest.approx(2 / 3)
