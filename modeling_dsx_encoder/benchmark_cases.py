"""What the benchmark measures: named cases, and the batches of each, the same for every competitor.

- `Shape`: width, depth and heads; `Texts`: how long the texts are and how they are batched; `Case`: both, with a mode,
  a precision and the kind of layers
- `all_cases()`: short texts in random order, sorted by length and unpadded; long texts under local attention; the
  latency of one text; the growth of time with length; the same through tools that users run; real weights and texts
- `make_batches()`: the texts of a case, decided by a seed
"""

import fnmatch
import itertools
from dataclasses import dataclass, replace
from typing import Literal

import torch

# Size of BERT's vocabulary; token numbers below FIRST_WORD are special ones.
VOCAB_SIZE = 30522
FIRST_WORD = 1000
SLIDING_WINDOW = 64  # radius: ModernBERT's `local_attention=128` is this window


@dataclass(frozen=True)
class Shape:
    """Width, depth and number of heads of all competitors."""

    hidden_size: int
    num_layers: int
    num_heads: int

    def __str__(self) -> str:
        return f"{self.hidden_size}x{self.num_layers}"


@dataclass(frozen=True)
class Texts:
    """Lengths in tokens of a case's texts, and how they are batched.

    Args:
        shortest: No text is shorter.
        longest: No text is longer; equal to `shortest`: all texts have this length.
        batch_size: Texts in one batch, padded to the longest of them.
        num_batches: Batches in one round.
        median: Lengths are lognormal about it with deviation `sigma`; None: uniform between shortest and longest.
        by_length: The same texts, sorted by length before they are batched.
        doubling: The texts of a batch are twice as long as those of the batch before.
    """

    shortest: int
    longest: int
    batch_size: int
    num_batches: int
    median: int | None = None
    sigma: float = 0.8
    by_length: bool = False
    doubling: bool = False

    def lengths(self, generator: torch.Generator) -> list[int]:
        """Lengths of all texts, in the order in which they are batched."""
        number = self.batch_size * self.num_batches
        if self.doubling:
            return [self.shortest << index // self.batch_size for index in range(number)]
        if self.median is None:
            lengths = torch.randint(self.shortest, self.longest + 1, (number,), generator=generator)
        else:
            lengths = (self.median * (self.sigma * torch.randn(number, generator=generator)).exp()).round().long()
            lengths = lengths.clamp(self.shortest, self.longest)
        return lengths.tolist()


@dataclass(frozen=True)
class Case:
    """One line-up: all competitors on the same batches.

    Args:
        texts_name: Key of the texts in the case's name.
        texts: Lengths and batching.
        mode: "inference" is a forward, "training" a forward and a backward; an optimizer would cost all alike.
        shape: Of all competitors.
        precision: "bf16" is autocast.
        layers: "full" attention everywhere; "mixed": every third layer full, the others with a window, where a
            competitor can; "sliding": windows only.
        competitors: Who takes part.
        tool: Not the model is called but this tool of the users', a key of `benchmark_tools.TOOLS`.
        weights: Not new weights in this shape but these, stock and converted: a key of `bundled.BUNDLED`, or a folder.
    """

    texts_name: str
    texts: Texts
    mode: Literal["inference", "training"]
    shape: Shape
    precision: Literal["fp32", "bf16"]
    layers: Literal["full", "mixed", "sliding"] = "full"
    competitors: tuple[str, ...] = ("dsx", "bert", "modernbert", "onnxruntime")
    tool: str | None = None
    weights: str | None = None

    @property
    def name(self) -> str:
        """As it stands in tables and after `--cases`: random-inference-256x6-fp32, minilm-random-32."""
        if self.weights:
            return self.texts_name
        return f"{self.texts_name}-{self.mode}-{self.shape}-{self.precision}"

    def layer_types(self) -> list[str]:
        """Kind of attention of each layer, in the words of transformers."""
        every = {"full": 1, "mixed": 3, "sliding": self.shape.num_layers + 1}[self.layers]
        first = 1 if self.layers == "sliding" else 0
        kinds = ("full_attention", "sliding_attention")
        return [kinds[bool((index + first) % every)] for index in range(self.shape.num_layers)]


SHAPES = (Shape(256, 6, 4), Shape(384, 6, 12))
SHORT = Texts(shortest=8, longest=256, batch_size=32, num_batches=4, median=50)
TEXTS = {
    "random": SHORT,
    "sorted": replace(SHORT, by_length=True),
    "unpadded": Texts(shortest=128, longest=128, batch_size=32, num_batches=2),
    "latency16": Texts(shortest=16, longest=16, batch_size=1, num_batches=20),
    "latency64": Texts(shortest=64, longest=64, batch_size=1, num_batches=20),
    "long2048": Texts(shortest=512, longest=2048, batch_size=4, num_batches=2),
    "long8192": Texts(shortest=8192, longest=8192, batch_size=1, num_batches=1),
    "growth": Texts(shortest=2048, longest=16384, batch_size=1, num_batches=4, doubling=True),
}
# Real sentences have the lengths that they have; one at a time and 32 at a time they are the same 128.
SENTENCES = tuple(Texts(shortest=4, longest=256, batch_size=size, num_batches=128 // size) for size in (1, 32))


def all_cases() -> list[Case]:
    """Every case, in the order in which they are run: a run that is stopped early has seen the usual ones."""
    modes, precisions = ("inference", "training"), ("fp32", "bf16")
    cases = [
        Case(name, TEXTS[name], mode, shape, precision)
        for precision, shape, mode, name in itertools.product(
            precisions, SHAPES, modes, ("random", "sorted", "unpadded")
        )
    ]
    for shape, name in itertools.product(SHAPES, ("latency16", "latency64")):
        cases.append(Case(name, TEXTS[name], "inference", shape, "fp32"))
    for precision, mode, name in itertools.product(precisions, modes, ("long2048", "long8192")):
        cases.append(Case(name, TEXTS[name], mode, SHAPES[0], precision, layers="mixed"))
    cases.append(Case("growth", TEXTS["growth"], "inference", SHAPES[0], "fp32", "sliding", ("dsx",)))
    tools = {"sentence-transformers": "inference", "pipeline": "inference", "trainer": "training"}
    for tool, mode in tools.items():
        cases.append(Case(tool, SHORT, mode, SHAPES[0], "fp32", competitors=("dsx", "bert"), tool=tool))
    for tool, texts in itertools.product((None, "sentence-transformers"), SENTENCES):
        name, pair = f"minilm-{'encode' if tool else 'random'}-{texts.batch_size}", ("dsx", "bert")
        cases.append(Case(name, texts, "inference", SHAPES[1], "fp32", "full", pair, tool, "minilm-l6-en"))
    return cases


def find_cases(patterns: list[str]) -> list[Case]:
    """The cases whose name one of the patterns matches: `random-*`, `*-training-*-bf16`; all where none is given."""
    cases = all_cases()
    if not patterns:
        return cases
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise ValueError(
                f"cases holds {pattern!r}, which matches none: give names or patterns such as 'random-*'; known are "
                + ", ".join(case.name for case in cases)
            )
    return [case for case in cases if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]


def make_batches(texts: Texts, seed: int, device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    """Batches of `input_ids` and `attention_mask`, `(batch_size, longest of the batch)`, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = texts.lengths(generator)
    rows = [torch.randint(FIRST_WORD, VOCAB_SIZE, (length,), generator=generator) for length in lengths]
    if texts.by_length:
        rows.sort(key=len)
    batches = []
    for start in range(0, len(rows), texts.batch_size):
        batch = rows[start : start + texts.batch_size]
        input_ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        counts = torch.tensor([len(row) for row in batch])
        mask = (torch.arange(input_ids.shape[1]) < counts[:, None]).long()
        batches.append({"input_ids": input_ids.to(device), "attention_mask": mask.to(device)})
    return batches
