"""From pretrained weights and Chinese reviews to a classifier that answers, on two CPU cores.

    python scripts/demo.py
    python scripts/demo.py --output_dir runs/another_demo

Ends with tables, and the line `demo: accuracy <encoder> tfidf <...> tfidf on the same part <...> n <texts>`.
"""

from dataclasses import dataclass
from pathlib import Path

from modeling_dsx_encoder.demo import Demo
from modeling_dsx_encoder.recipe import described, parse_recipe


@dataclass
class DemoArguments:
    """Where the demo writes."""

    output_dir: str = described("runs/demo", "Folder for all that the demo makes.")


def main() -> None:
    """Parse and run."""
    (arguments,) = parse_recipe((DemoArguments,))
    Demo(Path(arguments.output_dir)).run()


if __name__ == "__main__":
    main()
