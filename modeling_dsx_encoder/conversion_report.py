"""What a conversion did: the largest difference of every output, and what became of every key.

- `compare`: two models on one padded batch, in fp32
- `ConversionReport`: the figures, as a table for the terminal, and the refusal above a limit
"""

from dataclasses import dataclass, field

import torch
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

# Rounding of a different order of summation stays far below, a forgotten term far above.
TOLERANCE = 1e-4
# Outputs with one row for each sequence, not for each token.
POOLED_HEADS = ("SequenceClassification", "MultipleChoice")


@dataclass
class Difference:
    """One output of two models.

    Args:
        largest: Largest absolute difference on real tokens.
        scale: Largest absolute value that the stock model gives there.
    """

    largest: float
    scale: float

    def is_within(self, tolerance: float) -> bool:
        """Whether the difference is rounding: fp32 is exact to so many digits, not to so many places."""
        return self.largest <= tolerance * max(1.0, self.scale)  # False for a NaN


def padded_batch(stock: PreTrainedModel, ours: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Three rows of random pieces, padded on the right: `(3, L)`, longer than a window where the model takes that.

    The padding's own id stands on padding alone: RoBERTa counts positions by it.
    """
    config, generator = ours.config, torch.Generator().manual_seed(0)
    longest = max(48, 2 * (config.sliding_window or 0) + 16)
    longest = min(longest, ours.base_model.positions.num_table_rows or longest)
    lengths = (longest, max(longest // 3, 1), min(5, longest))
    pad = config.pad_token_id or 0
    input_ids = torch.full((3, longest), pad)
    mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        ids = torch.randint(0, max(config.vocab_size - 1, 1), (length,), generator=generator)
        input_ids[row, :length] = ids + (ids >= pad).long() if config.vocab_size > 1 else ids
        mask[row, :length] = 1
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    if config.type_vocab_size:
        types = torch.randint(0, config.type_vocab_size, input_ids.shape, generator=generator)
        inputs["token_type_ids"] = types * mask
    return inputs


@torch.no_grad()
def outputs_of(model: PreTrainedModel, inputs: dict, name: str, **options) -> dict[str, torch.Tensor]:
    """Everything that a model gives, on real tokens: `(num_tokens, ...)` each, or `(B, ...)` of pooled outputs."""
    mask = inputs["attention_mask"].bool()
    if name == "MultipleChoice":  # the rows as choices of one example
        inputs = {key: tensor[None] for key, tensor in inputs.items()}
    outputs = model(**inputs, **options)
    found = {f"hidden state {index}": tensor[mask] for index, tensor in enumerate(outputs.get("hidden_states") or ())}
    for what in ("last_hidden_state", "pooler_output", "start_logits", "end_logits", "logits"):
        tensor = outputs.get(what, outputs.get("prediction_logits") if what == "logits" else None)
        if tensor is not None:
            is_pooled = what == "pooler_output" or (what == "logits" and name in POOLED_HEADS)
            found[what] = tensor if is_pooled else tensor[mask]
    return found


def compare(stock: PreTrainedModel, ours: PreTrainedModel, name: str) -> dict[str, Difference]:
    """Differences of all outputs in fp32: hidden states layer by layer, then what the default path gives.

    Args:
        stock: Model of transformers; made fp32 in place.
        ours: DSX encoder with the same weights; made fp32 in place.
        name: Of the head, "" for the trunk.
    """
    stock, ours = stock.float().eval(), ours.float().eval()
    stock = stock if name else stock.base_model  # classes for pretraining lose their head
    inputs = padded_batch(stock, ours)
    theirs = outputs_of(stock, inputs, name, output_hidden_states=True)
    # With all hidden states every token is computed; without, real tokens alone.
    mine = outputs_of(ours, inputs, name, output_hidden_states=True) | outputs_of(ours, inputs, name)
    lacking = set(theirs) ^ set(mine)
    if lacking:
        raise ValueError(f"only one of the two models gives {', '.join(sorted(lacking))}.")
    found = {}
    for what, tensor in theirs.items():
        found[what] = Difference((tensor - mine[what]).abs().max().item(), tensor.abs().max().item())
    return found


@dataclass
class ConversionReport:
    """What was converted, and how well.

    Args:
        source: As it was named.
        target: The folder that was written.
        family: `model_type` of the stock side.
        source_class: Class that was read.
        target_class: Class that was written.
        dtype: Of the weights.
        num_parameters: Tied ones counted once.
        differences: By output, in the order of the computation.
        unknown: Keys of the file that its own class has no place for.
        fresh: Keys that the file does not have: random values, to be trained.
        dropped: Weights that the map drops on purpose, or that stay random in the stock class.
        differing: Second copies of a tensor that were not equal to the one that is computed with.
        notes: Further sentences.
        trim: What `--trim-vocabulary` did.
    """

    source: str
    target: str
    family: str
    source_class: str
    target_class: str
    dtype: str
    num_parameters: int
    differences: dict[str, Difference]
    unknown: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trim: object | None = None

    @property
    def largest(self) -> float:
        """The largest difference of all outputs."""
        return max(difference.largest for difference in self.differences.values())

    def check(self, tolerance: float = TOLERANCE) -> None:
        """Refuse a conversion that computes something else.

        Raises:
            ValueError: Naming the first output that parts.
        """
        for what, difference in self.differences.items():
            if not difference.is_within(tolerance):
                raise ValueError(
                    f"{self.source_class} and {self.target_class} part at {what}: they differ by "
                    f"{difference.largest:.3g}, where values reach {difference.scale:.3g} and {tolerance:g} of that "
                    "(of 1 at least) is the limit. Nothing was written. The checkpoint may hold what its "
                    "configuration does not say; please report it."
                )

    def table(self) -> Table:
        """The figures, and the keys that need a look."""
        table = Table(title=f"{self.source_class} -> {self.target_class}", caption=f"written to {self.target}")
        table.add_column("output on real tokens, fp32")
        table.add_column("largest difference", justify="right")
        table.add_column("largest value", justify="right")
        for what, difference in self.differences.items():
            table.add_row(what, f"{difference.largest:.2e}", f"{difference.scale:.3g}")
        table.add_section()
        table.add_row("parameters", f"{self.num_parameters:,}", self.dtype)
        return table

    def remarks(self) -> list[Text]:
        """Sentences about keys, one a line."""
        lines = []
        for what, keys in (
            ("unknown to the source's own class, left out", self.unknown),
            ("not in the source, values are random: train them", self.fresh),
            ("dropped on purpose", self.dropped),
            ("a second copy that is not computed with, left out", self.differing),
        ):
            lines += [Text(f"{what}: {', '.join(keys)}")] if keys else []
        return lines + [Text(note) for note in self.notes]
