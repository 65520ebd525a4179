"""The demo: its baseline learns, its stages fit each other, its last line says what the scores say."""

import csv
import random

import pytest
from datasets import Dataset, DatasetDict

from modeling_dsx_encoder.demo import Demo, tfidf_accuracy

GOOD, BAD = "好美棒喜快", "差坏烂慢脏"


def reviews(num_rows, seed):
    """Texts of two classes that a few characters tell apart."""
    chance = random.Random(seed)
    rows = []
    for number in range(num_rows):
        label = number % 2
        text = "".join(chance.choice("的了是在有我他这" + (GOOD if label else BAD)) for _ in range(20))
        rows.append({"text": f"{text}{number}", "label": ("差评", "好评")[label]})
    return rows


def test_baseline_learns_what_characters_tell():
    splits = DatasetDict({name: Dataset.from_list(reviews(120, seed)) for seed, name in enumerate(("train", "test"))})
    splits["validation"] = splits["test"]
    assert tfidf_accuracy(splits) > 0.95


def test_last_line_says_what_was_measured(tmp_path, capsys):
    line = Demo(tmp_path).report({"accuracy": 0.8444, "rows": 1764}, {"accuracy": 0.8, "rows": 1764}, 0.84271)
    assert line == "demo: accuracy 0.844 tfidf 0.843 scratch 0.800 n 1764"
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_a_stage_that_fails_stops_the_demo(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)train_tokenizer\.py.*exit status"):
        Demo(tmp_path, data="no/such/file.csv").run()
    assert not (tmp_path / "pretrained").exists()


@pytest.mark.slow
def test_all_stages_fit_each_other(tmp_path):
    data = tmp_path / "reviews"
    data.mkdir()
    for seed, (name, num_rows) in enumerate({"train": 300, "validation": 40, "test": 40}.items()):
        with (data / f"{name}.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["text", "label"])
            writer.writeheader()
            writer.writerows(reviews(num_rows, seed))
    quick = ("--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false")
    demo = Demo(tmp_path / "demo", str(data), vocabulary=("--vocab_size", "280"), quick=quick)
    assert demo.run().startswith("demo: accuracy ")
    assert (tmp_path / "demo" / "export" / "README.md").is_file()
    assert len(demo.seconds) == 9
