"""Every script explains itself, and the road from raw text to scores works, on one process and on two."""

import json
import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tiny import tiny_config

from modeling_dsx_encoder import (
    DsxEncoderForMaskedLM,
    DsxEncoderForSequenceClassification,
    DsxEncoderForTokenClassification,
)

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
MODEL = ["--preset", "dsx-tiny", "--overrides", "hidden_size=32", "num_hidden_layers=2", "intermediate_size=48"]
NO_DROPOUT = ["hidden_dropout=0.0", "attention_dropout=0.0", "embedding_dropout=0.0"]
PLAIN = ["--use_cpu", "true", "--disable_tqdm", "true", "--report_to", "none", "--logging_steps", "1"]


def script(name, *options):
    """Runs a script in this process: starting Python takes longer than two training steps."""
    before = sys.argv
    sys.argv = [str(ROOT / "scripts" / f"{name}.py"), *map(str, options)]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before


def environment():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def work(tmp_path_factory, tiny_tokenizer):
    """A folder with a tokenizer and 90 labelled reviews."""
    folder = tmp_path_factory.mktemp("work")
    tiny_tokenizer.save_pretrained(folder / "tokenizer")
    choose = random.Random(0).choice
    rows = []
    for number in range(90):
        middle = "".join(choose("书买家机手这本送货服务电影的一是") for _ in range(number % 23 + 1))
        label = choose(["正面", "负面"])
        rows.append({"text": middle + {"正面": "好推荐", "负面": "坏失望"}[label], "label": label})
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "reviews.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def pretrained(work):
    """Where the pretraining script left its model, after two steps."""
    options = [
        "--tokenizer",
        work / "tokenizer",
        "--texts",
        work / "reviews.jsonl",
        "--output_dir",
        work / "pretrained",
    ]
    options += [*PLAIN, "--max_steps", 2, "--save_strategy", "steps", "--save_steps", 1, "--max_length", 32]
    options += ["--validation_fraction", 0.2, "--per_device_train_batch_size", 16]
    script("pretrain", ROOT / "configuration/recipes/pretrain.yaml", *MODEL, *options)
    return work / "pretrained"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_shows_its_options_and_is_short(path, capsys):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"python scripts/{path.name}" in text.split('"""')[1]
    with pytest.raises(SystemExit, match="0"):
        script(path.stem, "--help")
    assert "usage:" in capsys.readouterr().out


def test_pretraining_leaves_a_model_with_its_record(pretrained):
    model = DsxEncoderForMaskedLM.from_pretrained(pretrained)
    assert model.config.hidden_size == 32
    metrics = json.loads((pretrained / "metrics.json").read_text())
    assert 0 < metrics["eval_loss"] < 10 < metrics["eval_perplexity"]
    recipe = yaml.safe_load((pretrained / "recipe.yaml").read_text(encoding="utf-8"))
    assert (recipe["preset"], recipe["mask_probability"]) == ("dsx-tiny", 0.3)
    assert recipe["output_dir"] == str(pretrained)
    assert {path.name for path in (pretrained / "checkpoints").iterdir()} == {"checkpoint-1", "checkpoint-2"}
    assert (pretrained / "modeling_dsx_encoder.py").is_file()


def test_an_earlier_run_is_not_overwritten_by_chance(work, pretrained):
    options = [
        "--tokenizer",
        work / "tokenizer",
        "--texts",
        work / "reviews.jsonl",
        "--output_dir",
        pretrained,
        *PLAIN,
    ]
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
        script("pretrain", *MODEL, *options)


def test_fine_tuned_model_is_scored_the_same_by_trainer_and_pipeline(work, pretrained, capsys):
    options = ["--checkpoint", pretrained, "--data", work / "reviews.jsonl", "--output_dir", work / "tuned", *PLAIN]
    options += ["--num_train_epochs", 1, "--max_length", 64, "--validation_fraction", 0.2, "--test_fraction", 0.3]
    script("finetune", ROOT / "configuration/recipes/classification.yaml", *options)
    assert "0 (0.0%) cut at" in capsys.readouterr().out
    config = json.loads((work / "tuned/config.json").read_text(encoding="utf-8"))
    assert sorted(config["id2label"].values()) == ["正面", "负面"]
    assert config["problem_type"] == "single_label_classification"
    metrics = json.loads((work / "tuned/metrics.json").read_text())
    options = ["--checkpoint", work / "tuned", "--data", work / "reviews.jsonl", "--split", "test"]
    options += ["--validation_fraction", 0.2, "--test_fraction", 0.3, "--scores_file", work / "scores.json"]
    script("evaluate", *options)
    scores = json.loads((work / "scores.json").read_text())
    assert json.loads(capsys.readouterr().out) == scores
    for name in ("accuracy", "f1", "matthews_correlation"):
        assert scores[name] == pytest.approx(metrics[f"test_{name}"], abs=1e-6)
    assert scores["rows"] > 10


def losses(folder):
    """Losses of all steps and evaluations of a run, and its final metrics."""
    last = max(folder.glob("checkpoints/checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    metrics = json.loads((folder / "metrics.json").read_text())
    names = ("loss", "grad_norm", "eval_loss")
    found = [entry[name] for entry in history for name in names if name in entry]
    return [*found, metrics["eval_loss"], metrics["test_loss"]]


def test_classify_answers_by_the_kind_of_model(tmp_path, tiny_tokenizer, capsys):
    labels = {0: "快递", 1: "质量", 2: "价格"}
    kinds = {
        "multi_label_classification": r"价格 0\.953, 快递 0\.881  很好",
        "single_label_classification": r" 价格 0\.7\d+  很好",
    }
    tiny_tokenizer.save_pretrained(tmp_path)
    for problem_type, answer in kinds.items():
        config = tiny_config(vocab_size=len(tiny_tokenizer), id2label=labels, problem_type=problem_type)
        model = DsxEncoderForSequenceClassification(config)
        with torch.no_grad():
            model.classifier.weight.zero_()
            model.classifier.bias.copy_(torch.tensor([2.0, -2.0, 3.0]))
        model.save_pretrained(tmp_path)
        script("classify", tmp_path, "很好")
        assert re.search(answer, capsys.readouterr().out)
    DsxEncoderForTokenClassification(config).save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        script("classify", tmp_path, "很好")
    assert "holds DsxEncoderForTokenClassification" in capsys.readouterr().err


def test_two_processes_give_the_losses_of_one(work):
    options = [*MODEL, *NO_DROPOUT, "--tokenizer", work / "tokenizer", "--data", work / "reviews.jsonl", *PLAIN]
    options += ["--num_train_epochs", 2, "--eval_strategy", "epoch", "--save_strategy", "epoch"]
    options += ["--train_sampling_strategy", "group_by_length", "--learning_rate", 0.003]
    script("finetune", *options, "--per_device_train_batch_size", 16, "--output_dir", work / "one")
    file = ROOT / "configuration/accelerate/cpu_two_processes.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, "--main_process_port", 0]
    options += ["--per_device_train_batch_size", 8, "--output_dir", work / "two"]
    command = list(map(str, [*launch, ROOT / "scripts/finetune.py", *options]))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = losses(work / "one"), losses(work / "two")
    assert len(one) > 10
    assert two == pytest.approx(one, abs=1e-4)


def test_scripts_beside_evaluate_find_the_library_of_that_name():
    code = "import evaluate; assert evaluate.Metric and 'scripts' not in evaluate.__file__"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); {code}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
