"""Both READMEs: their Python runs, and their commands do what they say, on a file like a reader's own."""

import copy
import csv
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, BertForSequenceClassification, BertModel, pipeline

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "README.zh-CN.md")


def blocks(readme, language):
    """The code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / readme).read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(block):
    """The lines of a shell block as argument lists, continued lines joined."""
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_both_languages_say_the_same():
    for language in ("python", "bash"):
        without_comments = [[re.sub(r"\s*#.*", "", block) for block in blocks(readme, language)] for readme in READMES]
        assert without_comments[0] == without_comments[1]


@pytest.mark.parametrize("readme", READMES)
def test_ten_lines_run(readme, capsys):
    exec(compile(blocks(readme, "python")[0], readme, "exec"), {})
    assert "torch.Size([2, 3]) torch.Size([2, 8, 16, 16])" in capsys.readouterr().out


EVALUATE_NEVER = ["--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]
QUICK = {
    "train_tokenizer.py": ["--vocab_size", "280"],
    "pretrain.py": ["--max_steps", "2"],
    "finetune.py": ["--max_steps", "2", *EVALUATE_NEVER],
}


@pytest.fixture
def workplace(tmp_path):
    """A folder with scripts, configuration and `reviews.csv`, where commands run as a reader types them."""
    chance = random.Random(0)
    with (tmp_path / "reviews.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label"])
        for number in range(200):
            good = number % 2
            words = "很好喜欢干净方便快" if good else "很差失望难看太慢贵"
            writer.writerow(["".join(chance.choice(words) for _ in range(8)) + str(number), ("差评", "好评")[good]])
    for name in ("scripts", "configuration"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_block(marker, place):
    """Run the one shell block with `marker` in it; names of the scripts, and what each printed."""
    (block,) = [block for block in blocks("README.md", "bash") if marker in block]
    ran = []
    for words in commands(block):
        if words[0] != "python":
            continue
        script = Path(words[1]).name
        result = subprocess.run(
            [sys.executable, *words[1:], *QUICK.get(script, [])],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
        ran.append((script, result.stdout))
    return ran


def test_commands_fine_tune_on_a_file(workplace):
    ran = run_block("train_tokenizer.py", workplace)
    assert [name for name, _ in ran] == [
        "train_tokenizer.py",
        "pretrain.py",
        "finetune.py",
        "evaluate.py",
        "classify.py",
    ]
    assert re.search(r"(差评|好评) +0\.\d+ +很好，下次还来", ran[-1][1])


def test_a_bert_becomes_ours_is_fine_tuned_and_goes_back(workplace, tiny_tokenizer):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    BertModel(BertConfig(vocab_size=len(tiny_tokenizer), **shape)).save_pretrained(workplace / "my-bert")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(workplace / "my-bert")
    ran = run_block("convert_checkpoint.py my-bert", workplace)
    assert [name for name, _ in ran] == ["convert_checkpoint.py", "finetune.py", "convert_checkpoint.py"]
    assert "hidden state 2" in ran[0][1]
    texts = ["很好，下次还来", "很差"]
    stock = pipeline("text-classification", model=str(workplace / "runs" / "classification-bert"))
    assert isinstance(stock.model, BertForSequenceClassification)
    folder = str(workplace / "runs" / "classification")
    ours = pipeline("text-classification", model=folder, trust_remote_code=True)
    for answer, expected in zip(stock(texts), ours(texts), strict=True):
        assert answer["label"] == expected["label"]
        assert answer["label"] in ("差评", "好评")
        assert answer["score"] == pytest.approx(expected["score"], abs=1e-5)
