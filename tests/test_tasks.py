"""Each task from rows to batches, configuration and scores."""

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    EvalPrediction,
)

from modeling_dsx_encoder.data import LabelMap, tokenize_splits
from modeling_dsx_encoder.tasks import TASKS

TRAIN = {
    "single_label": [{"text": "好" * n, "label": ("正面", "负面", "中性")[n % 3]} for n in range(1, 7)],
    "multi_label": [
        {"text": "好", "label": "快递;质量"},
        {"text": "很好", "label": "服务"},
        {"text": "坏", "label": ""},
    ],
    "regression": [{"text": "好", "text_pair": "很好", "label": 3.5}, {"text": "坏", "text_pair": "快", "label": "1"}],
    "token": [{"tokens": ["我", "好"], "ner_tags": ["B-PER", "O"]}, {"tokens": ["书"], "ner_tags": ["O"]}],
}


def rows_of(name):
    rows = TRAIN[name]
    if name == "regression":
        rows = [{**row, "label": float(row["label"])} for row in rows]
    return Dataset.from_list(rows)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_makes_batches_and_a_configuration(name, tiny_tokenizer):
    task, rows = TASKS[name], rows_of(name)
    assert task.name == name
    label_map = task.label_map(rows)
    tokenized, _ = tokenize_splits(DatasetDict({"train": rows}), tiny_tokenizer, task, label_map=label_map)
    batch = task.collator(tiny_tokenizer, pad_to_multiple_of=8)([tokenized["train"][i] for i in range(len(rows))])
    assert batch["input_ids"].shape[1] % 8 == 0
    labels = batch["labels"]
    expected = {
        "single_label": (torch.int64, (6,)),
        "multi_label": (torch.float32, (3, 3)),
        "regression": (torch.float32, (2,)),
        "token": (torch.int64, tuple(batch["input_ids"].shape)),
    }
    assert (labels.dtype, tuple(labels.shape)) == expected[name]
    config = BertConfig(
        **task.config_kwargs(label_map),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    assert config.num_labels == len(label_map)
    assert config.id2label == label_map.id2label
    assert config.problem_type == task.problem_type
    assert LabelMap.from_config(config) == label_map
    # the head takes the batch as it is, and its loss fits the labels
    model = task.auto_class.from_config(config)
    output = model(**batch)
    assert torch.isfinite(output.loss)
    scores = task.compute_metrics(label_map)(EvalPrediction(output.logits.detach().numpy(), labels.numpy()))
    assert task.metric_for_best_model in scores
    assert all(np.isfinite(value) for value in scores.values())


def test_heads_and_problem_types():
    assert TASKS["token"].auto_class is AutoModelForTokenClassification
    assert TASKS["token"].pipeline_name == "token-classification"
    for name in ("single_label", "multi_label", "regression"):
        assert TASKS[name].auto_class is AutoModelForSequenceClassification
        assert TASKS[name].pipeline_name == "text-classification"
    assert all(task.greater_is_better for task in TASKS.values())


def scores_of(name, logits, labels, label_map=None):
    task = TASKS[name]
    return task.compute_metrics(label_map or task.label_map(rows_of(name)))(EvalPrediction(logits, labels))


def test_single_label_scores():
    logits = np.array([[2.0, 0, 0], [0, 2, 0], [0, 2, 0]])
    assert scores_of("single_label", logits, np.array([0, 1, 2]))["accuracy"] == pytest.approx(2 / 3)
    # hidden states behind the logits are ignored
    assert scores_of("single_label", (logits, logits[:, :1]), np.array([0, 1, 1]))["accuracy"] == 1.0


def test_multi_label_flags_and_scores():
    task, rows = TASKS["multi_label"], rows_of("multi_label")
    label_map = task.label_map(rows)
    assert label_map.names == ("快递", "服务", "质量")
    assert task.encode(rows, label_map) == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    logits = np.array([[3.0, -1, 0.1], [-1, -1, -1], [-1, -1, -1]])
    scores = scores_of("multi_label", logits, np.array(task.encode(rows, label_map)))
    assert scores["exact_match"] == pytest.approx(2 / 3)
    assert scores["f1_micro"] == pytest.approx(0.8)
    with pytest.raises(ValueError, match="label '包装' in row 1 of test"):
        task.encode(Dataset.from_list([{"label": "快递"}, {"label": "快递;包装"}]), label_map, "test")


def test_lists_of_labels_are_multi_label_only():
    rows = Dataset.from_list([{"label": ["快递", "质量"]}, {"label": ["服务"]}])
    assert TASKS["multi_label"].label_map(rows).names == ("快递", "服务", "质量")
    with pytest.raises(TypeError, match="need the task multi_label"):
        TASKS["single_label"].label_map(rows)


def test_regression_scores_and_errors():
    task = TASKS["regression"]
    rows = Dataset.from_list([{"label": "3.8"}, {"label": "5"}])
    assert task.encode(rows, task.label_map(rows)) == [3.8, 5.0]
    assert scores_of("regression", np.array([[1.0], [2.0]]), np.array([3.0, 4.0]))["spearman"] == pytest.approx(1.0)
    for bad in ("很好", None, "nan"):
        with pytest.raises(ValueError, match=r"in row 1 of test is no finite number.*single_label"):
            task.encode(Dataset.from_list([{"label": "1"}, {"label": bad}]), LabelMap(("score",)), "test")


def test_one_class_is_never_silently_regression():
    with pytest.raises(ValueError, match="train has 1 class"):
        TASKS["single_label"].label_map(Dataset.from_list([{"label": 1}, {"label": 1}]))


def test_token_scores_use_labelled_pieces_only():
    label_map = LabelMap(("O", "B-PER", "I-PER"))
    labels = np.array([[-100, 1, -100, 2, -100], [-100, 0, -100, -100, -100]])
    logits = np.eye(3)[np.array([[0, 1, 0, 2, 1], [1, 0, 1, 1, 1]])]
    scores = scores_of("token", logits, labels, label_map)
    assert scores == {"precision": 1.0, "recall": 1.0, "f1": pytest.approx(1.0), "accuracy": 1.0}


def test_tags_and_tokens_of_different_length_are_refused():
    rows = Dataset.from_list([{"tokens": ["我"], "ner_tags": ["O"]}, {"tokens": ["我", "好"], "ner_tags": ["O"]}])
    with pytest.raises(ValueError, match="row 1 of test has 2 tokens but 1 ner_tags"):
        TASKS["token"].encode(rows, LabelMap(("O", "B-PER")), "test")
