"""The demo: its baseline learns, its stages fit each other, its last line says what the scores say."""

import csv
import random

import pytest
from datasets import Dataset, DatasetDict
from transformers import BertConfig, BertModel

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
    assert tfidf_accuracy(splits, splits["train"]) > 0.95
    wrong = [{"好评": "差评", "差评": "好评"}[label] for label in splits["train"]["label"]]
    part = splits["train"].remove_columns("label").add_column("label", wrong)
    assert tfidf_accuracy(splits, part) < 0.05  # it learns from the rows that it is given, not from the whole split


def test_last_line_says_what_was_measured(tmp_path, capsys):
    line = Demo(tmp_path).report({"accuracy": 0.8744, "rows": 1764}, (6000, 0.82134), (13870, 0.84271))
    assert line == "demo: accuracy 0.874 tfidf 0.843 tfidf on the same part 0.821 n 1764"
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == line
    assert all(number in printed for number in ("6000", "13870", "multilingual-e5-small"))


def test_a_stage_that_fails_stops_the_demo(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)convert_checkpoint\.py.*exit status"):
        Demo(tmp_path, encoder="no/such/folder").run()
    assert not (tmp_path / "encoder").exists()


@pytest.mark.slow
def test_all_stages_fit_each_other(tmp_path, tiny_tokenizer):
    data = tmp_path / "reviews"
    data.mkdir()
    for seed, (name, num_rows) in enumerate({"train": 300, "validation": 40, "test": 40}.items()):
        with (data / f"{name}.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["text", "label"])
            writer.writeheader()
            writer.writerows(reviews(num_rows, seed))
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    BertModel(BertConfig(vocab_size=len(tiny_tokenizer), **shape)).save_pretrained(tmp_path / "bert")
    tiny_tokenizer.save_pretrained(tmp_path / "bert")
    quick = ("--max_steps", "2", "--num_frozen_layers", "1", "--eval_strategy", "no", "--save_strategy", "no")
    quick += ("--load_best_model_at_end", "false")
    demo = Demo(tmp_path / "demo", str(tmp_path / "bert"), str(data), num_reviews=100, quick=quick)
    assert demo.run().startswith("demo: accuracy ")
    assert (tmp_path / "demo" / "export" / "README.md").is_file()
    assert len(demo.seconds) == 7
