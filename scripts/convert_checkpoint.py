"""Turn a checkpoint of another encoder into a DSX checkpoint, with its error printed; or a DSX checkpoint back.

    python scripts/convert_checkpoint.py bert-base-chinese runs/bert-dsx
    python scripts/convert_checkpoint.py path/to/folder runs/encoder-dsx --trim-vocabulary reviews.csv notes.txt
    python scripts/convert_checkpoint.py runs/tuned runs/tuned-bert --to-family bert

SOURCE is a folder, an id on the Hub, or the name of an encoder that an installed package carries; it is only read.
TARGET appears complete and checked, or not at all: it is loaded back, and both models read the same padded batch.
Families: bert, roberta, xlm-roberta, camembert, roberta-prelayernorm, electra, distilbert, mpnet and more.
"""

import sys
from dataclasses import dataclass
from itertools import takewhile

from rich.console import Console

from modeling_dsx_encoder.conversion import convert
from modeling_dsx_encoder.recipe import described, parse_recipe, require


@dataclass
class ConvertArguments:
    """What to convert, and where to."""

    source: str | None = described(None, "Folder, id on the Hub, or name of a bundled encoder; the first argument.")
    target: str | None = described(None, "Folder to make; the second argument.")
    to_family: str | None = described(None, "Go back: the family of the stock checkpoint to make, such as bert.")
    head: str | None = described(None, "base, MaskedLM, ...: another class than the weights were saved from.")
    allow_pickle: bool = described(False, "Read old .bin files too; they can run code of whoever made them.")
    trim_vocabulary: list[str] = described([], "Files of texts: keep only the pieces that they use.")
    text_column: str = described("text", "Column of those texts, where the files have columns.")
    text_pair_column: str | None = described(None, "Column of second texts.")
    overwrite: bool = described(False, "Replace an earlier conversion.")


def with_names(argv: list[str]) -> list[str]:
    """SOURCE and TARGET in front, as the options they are; a recipe in their place stays."""
    places = list(takewhile(lambda word: not word.startswith("-"), argv))[:2]
    if not places or places[0].endswith((".yaml", ".yml")):
        return argv
    named = [word for pair in zip(("--source", "--target"), places, strict=False) for word in pair]
    return named + argv[len(places) :]


def main() -> None:
    """Convert, compare and report."""
    (arguments,) = parse_recipe((ConvertArguments,), with_names(sys.argv[1:]))
    require(arguments, "source", "target")
    report = convert(**vars(arguments))
    console = Console()
    if report.trim is not None:
        console.print(report.trim.table())
    console.print(report.table(), *report.remarks(), sep="\n")


if __name__ == "__main__":
    main()
