"""Scores of a saved model, measured as a user meets it: through `pipeline` and `evaluate`'s evaluators.

- `find_task`, `task_of`: the task that is asked for, or that a saved model was trained for
- `evaluate_rows`: labels are checked against the model's own before the first text is read by the model
- `TextEvaluator`, `TokenEvaluator`: `evaluate`'s evaluators for transformers 5, for several labels, numbers, tags too
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from evaluate.evaluator import TextClassificationEvaluator, TokenClassificationEvaluator
from evaluate.evaluator.utils import DatasetColumn
from transformers import AutoConfig, Pipeline, PreTrainedConfig, pipeline

from .building import naming_source
from .labels import LabelMap
from .presets import nearest
from .tasks import TASKS, Task


class _TakesPipelines:
    """evaluate 0.4 asks transformers for TensorFlow classes that version 5 has not; a pipeline needs no such look."""

    def prepare_pipeline(self, model_or_pipeline, *args, **kwargs) -> Pipeline:
        """Takes a pipeline as it is."""
        if isinstance(model_or_pipeline, Pipeline):
            return model_or_pipeline
        return super().prepare_pipeline(model_or_pipeline, *args, **kwargs)


class TextEvaluator(_TakesPipelines, TextClassificationEvaluator):
    """One class, several labels, or a number for each text or pair of texts."""

    PIPELINE_KWARGS = {"truncation": True, "top_k": None}

    def __init__(self, task: Task):
        super().__init__()
        self.dsx_task = task

    def predictions_processor(self, predictions: list[list[dict]], label_mapping: dict[str, int]) -> dict[str, list]:
        """Turns the scores of all labels into what the task's metric takes."""
        return {"predictions": [self._predict(scores, label_mapping) for scores in predictions]}

    def _predict(self, scores: list[dict], label_mapping: dict[str, int]) -> Any:
        if self.dsx_task.name == "regression":
            return scores[0]["score"]
        if self.dsx_task.name == "multi_label":
            flags = [0] * len(label_mapping)
            for entry in scores:
                flags[label_mapping[entry["label"]]] = int(entry["score"] >= self.dsx_task.threshold)
            return flags
        return label_mapping[max(scores, key=lambda entry: entry["score"])["label"]]


class TokenEvaluator(_TakesPipelines, TokenClassificationEvaluator):
    """A tag for each word: that of its first piece, and O for words that were cut off."""

    def prepare_data(self, data: Dataset, input_column: str, label_column: str, join_by: str):
        """Joins the words; the labels are names of tags already."""
        self.check_required_columns(data, {"input_column": input_column, "label_column": label_column})
        joined = data.map(lambda row: {input_column: join_by.join(row[input_column])}, features=None)
        return {"references": data[label_column][:]}, DatasetColumn(joined, input_column)

    def predictions_processor(self, predictions, words, join_by: str) -> dict[str, list]:
        """Looks up the piece that begins where each word begins."""
        rows = []
        for pieces, row_words in zip(predictions, words, strict=True):
            tag_at = {piece["start"]: piece["entity"] for piece in reversed(pieces)}
            rows.append([tag_at.get(start, "O") for start, _ in self.words_to_offsets(row_words, join_by)])
        return {"predictions": rows}


def find_task(name: str | None) -> Task:
    """The task of that name; single_label for None."""
    if name is not None and name not in TASKS:
        raise ValueError(f"task={name!r} is unknown: {nearest(name, TASKS)}; tasks are {', '.join(TASKS)}")
    return TASKS[name or "single_label"]


def task_of(config: PreTrainedConfig) -> Task:
    """The task that a saved model was trained for, by its head and problem type."""
    if any(name.endswith("ForTokenClassification") for name in config.architectures or []):
        return TASKS["token"]
    for task in TASKS.values():
        if task.problem_type is not None and task.problem_type == config.problem_type:
            return task
    raise ValueError(
        f"architectures={config.architectures} and problem_type={config.problem_type!r} of the model tell of no task: "
        f"give one of {', '.join(TASKS)}, or fine-tune first"
    )


def load_config(model: str | Path, options: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a saved model; `options` are those of `pipeline`."""
    hub = {name: options[name] for name in ("trust_remote_code", "revision") if name in options}
    with naming_source("checkpoint", str(model)):
        return AutoConfig.from_pretrained(model, **hub)


def evaluate_rows(
    model: str | Path, rows: Dataset, *, task: str | None = None, batch_size: int = 32, where: str = "data", **options
) -> dict[str, float]:
    """Scores a saved model on rows as `load_rows` makes them.

    Args:
        model: Folder or Hub id.
        task: A key of `TASKS`; the model's own if None.
        batch_size: Texts in one forward.
        where: What the rows are, for messages.
        options: For `pipeline`: device, trust_remote_code, revision, ...
    """
    config = load_config(model, options)
    chosen = find_task(task) if task else task_of(config)
    label_map = LabelMap.from_config(config)
    labels = chosen.encode(rows, label_map, where)
    rows = rows.remove_columns(chosen.label_column)
    answer = pipeline(chosen.pipeline_name, model=str(model), batch_size=batch_size, **options)
    common = {"model_or_pipeline": answer, "metric": chosen.metric()}
    if chosen.name == "token":
        tags = [[label_map.names[number] for number in row] for row in labels]
        scores = TokenEvaluator().compute(data=rows.add_column("ner_tags", tags), **common)
    else:
        pair = "text_pair" if "text_pair" in rows.column_names else None
        data = rows.add_column("label", labels)
        label_mapping = label_map.label2id
        scores = TextEvaluator(chosen).compute(
            data=data, second_input_column=pair, label_mapping=label_mapping, **common
        )
    return {name: float(value) for name, value in scores.items() if math.isfinite(value)}
