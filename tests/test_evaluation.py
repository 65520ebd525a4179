"""Scores through the pipeline are those of the model itself, for every task."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import scramble, tiny_config
from transformers import pipeline

from modeling_dsx_encoder.encoding import tokenize_splits
from modeling_dsx_encoder.evaluation import TextEvaluator, evaluate_rows, find_task, load_config, task_of
from modeling_dsx_encoder.labels import LabelMap
from modeling_dsx_encoder.tasks import TASKS

TEXTS = ["这本书很好", "快递很慢", "手机坏差", "电影真糟糕，失望！", "喜欢", "推荐 good 100"]
LABELS = {
    "single_label": ["正面", "负面", "负面", "中性", "正面", "中性"],
    "multi_label": [["正面"], ["负面", "中性"], ["负面"], [], ["正面"], ["中性"]],
    "regression": [0.1, 0.9, -0.5, 2.0, 0.3, 1.0],
}
NAMES = ("中性", "正面", "负面")


def saved(name, folder, tokenizer):
    """A model with random weights and a label map, saved; and rows for its task."""
    task = TASKS[name]
    names = {"regression": ("score",), "token": ("O", "B-X", "I-X")}.get(name, NAMES)
    label_map = LabelMap(names)
    head = "DsxEncoderForTokenClassification" if name == "token" else "DsxEncoderForSequenceClassification"
    kwargs = task.config_kwargs(label_map)
    model = task.auto_class.from_config(tiny_config(vocab_size=len(tokenizer), **kwargs))
    scramble(model)
    assert type(model).__name__ == head
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if name == "token":
        words = [list(text.replace(" ", "")) for text in TEXTS]
        tags = [[names[i % 3] for i in range(len(row))] for row in words]
        rows = Dataset.from_dict({"tokens": words, "ner_tags": tags})
    else:
        rows = Dataset.from_dict({"text": TEXTS, "label": LABELS[name]})
    return task, model, label_map, rows


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("is_pair", [False, True])
def test_pipeline_scores_are_the_models_own(name, is_pair, tmp_path, tiny_tokenizer):
    task, model, label_map, rows = saved(name, tmp_path, tiny_tokenizer)
    if is_pair:
        if name == "token":
            return
        rows = rows.add_column("text_pair", TEXTS[::-1])
    found = evaluate_rows(tmp_path, rows, batch_size=4)
    encoded, _ = tokenize_splits({"test": rows}, tiny_tokenizer, task, label_map=label_map)
    logits, labels = [], []
    width = max(len(row["input_ids"]) for row in encoded["test"])
    for row in encoded["test"]:
        with torch.no_grad():
            alone = model(torch.tensor([row["input_ids"]])).logits[0].numpy()
        if name == "token":
            alone = np.pad(alone, ((0, width - len(alone)), (0, 0)))
            row["labels"] = row["labels"] + [-100] * (width - len(row["labels"]))
        logits.append(alone)
        labels.append(row["labels"])
    predictions, references = task.decode(np.stack(logits), np.array(labels), label_map)
    expected = task.metric().compute(predictions=predictions, references=references)
    assert {key: value for key, value in expected.items() if np.isfinite(value)} == pytest.approx(
        {key: found[key] for key in expected if key in found}, abs=1e-5
    )
    assert task_of(load_config(tmp_path, {})) is task


def test_unseen_label_is_an_error_before_any_forward(tmp_path, tiny_tokenizer, monkeypatch):
    _, _, _, rows = saved("single_label", tmp_path, tiny_tokenizer)
    monkeypatch.setattr("modeling_dsx_encoder.evaluation.pipeline", lambda *_, **__: pytest.fail("a model was built"))
    rows = Dataset.from_dict({"text": ["好", "坏"], "label": ["正面", "悲伤"]})
    with pytest.raises(ValueError, match=r"label '悲伤' in row 1 of a.csv"):
        evaluate_rows(tmp_path, rows, where="a.csv")


def test_scores_do_not_depend_on_the_order_of_rows_or_on_missing_classes(tmp_path, tiny_tokenizer):
    _, _, _, rows = saved("single_label", tmp_path, tiny_tokenizer)
    names = ("accuracy", "f1", "matthews_correlation")
    first = evaluate_rows(tmp_path, rows)
    back = evaluate_rows(tmp_path, rows.select(range(len(rows) - 1, -1, -1)))
    assert {name: first[name] for name in names} == pytest.approx({name: back[name] for name in names})
    answers = [answer["label"] for answer in pipeline("text-classification", model=str(tmp_path))(list(rows["text"]))]
    for name in NAMES:  # a file with one of the labels only is scored over the saved map
        kept = [row for row, label in enumerate(rows["label"]) if label == name]
        right = sum(answers[row] == name for row in kept) / len(kept)
        assert evaluate_rows(tmp_path, rows.select(kept))["accuracy"] == pytest.approx(right)


def test_unknown_tasks_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"task='singel_label' is unknown: did you mean 'single_label'"):
        find_task("singel_label")
    assert find_task(None).name == "single_label"
    with pytest.raises(ValueError, match=r"problem_type=None of the model tell of no task"):
        task_of(tiny_config())
    with pytest.raises(ValueError, match=r"checkpoint='no/where' is no folder"):
        load_config("no/where", {})


def test_evaluator_takes_folders_too(tmp_path, tiny_tokenizer):
    task, _, label_map, rows = saved("single_label", tmp_path, tiny_tokenizer)
    data = rows.remove_columns("label").add_column("label", task.encode(rows, label_map))
    scores = TextEvaluator(task).compute(
        str(tmp_path), data, metric=task.metric(), label_mapping=label_map.label2id, tokenizer=str(tmp_path)
    )
    assert scores["accuracy"] == evaluate_rows(tmp_path, rows)["accuracy"]
