"""The model card: README.md of an exported folder, filled from its config, its weights and the run that made it.

The template is `model_card.md` in the repository. Its first block becomes metadata that the Hub reads (licence,
languages, task, data sets, figures); what nobody knows is left out, never guessed.
"""

import json
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path

import transformers
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open

from .configuration_dsx_encoder import DsxEncoderConfig
from .recipe import described

CARD_TEMPLATE = Path(__file__).parents[1] / "model_card.md"
# Multiple choice and question answering are tasks of the Hub, but `transformers.pipeline` has no class for them.
HUB_TASKS = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}
# Written by the scripts beside the weights. The first that exists counts.
METRIC_FILES = ("metrics.json", "all_results.json")
RECIPE_FILE = "recipe.yaml"
# What a Trainer reports about its own speed is no figure of the model.
SPEED_WORDS = ("runtime", "per_second", "epoch", "total_flos", "_time", "memory")


@dataclass
class CardFacts:
    """What the model card says and neither the weights nor the run's files know."""

    model_name: str = described("", "Name on the card; the target folder's name if empty.")
    repo_id: str = described("", "Place on the Hub (user/name), from which the card's code loads the model.")
    languages: list[str] = described(["zh", "en"], "ISO codes of the languages of the training text.")
    datasets: list[str] = described(
        [], "Hub ids of the data sets; the figures are the last one's. The recipe's if empty."
    )
    base_model: str = described("", "Hub id of the checkpoint that was fine-tuned.")
    converted_from: str = described("", "What the weights were before they were converted.")
    license: str = described("apache-2.0", "Licence of the weights; of converted ones that of their source.")
    evaluated_on: str = described("", "Split that the figures were measured on; by the figures' names if empty.")


def auto_class_of(config: DsxEncoderConfig) -> str:
    """Return the name of the Auto class that loads the weights of this config whole, `AutoModelForMaskedLM` say."""
    architecture = config.architectures[0]
    for auto_class, reference in config.auto_map.items():
        if reference.split(".")[-1] == architecture:
            return auto_class
    raise ValueError(
        f"architectures={config.architectures!r} names no class of the auto_map ({', '.join(config.auto_map)}): "
        "save the model from one of the package's own classes."
    )


def fill_model_card(folder: Path, facts: CardFacts, *, run: Path, name: str, template: str | Path) -> ModelCard:
    """Fill the template with the folder's config and weights and the run's recipe and figures.

    Args:
        folder: Folder with config and weights.
        facts: What the weights do not know.
        run: Folder in which the scripts left recipe and metrics.
        name: Name of the model where `facts` has none.
        template: Jinja template.
    """
    if not Path(template).is_file():
        raise ValueError(
            f"template={str(template)!r} is no file: the package's own lies in the repository as model_card.md; "
            "name its path."
        )
    config = DsxEncoderConfig.from_pretrained(folder)
    auto_class = auto_class_of(config)
    task = HUB_TASKS[auto_class]
    split, metrics = _read_metrics(run)
    recipe = _read_recipe(run)
    name = facts.model_name or name
    data_names = facts.datasets or _data_names(recipe)
    evaluated_on = facts.evaluated_on or split
    return ModelCard.from_template(
        _metadata(
            name, HUB_TASKS[auto_class], facts, _figures(HUB_TASKS[auto_class], data_names, evaluated_on, metrics)
        ),
        template_str=Path(template).read_text(encoding="utf-8"),
        name=name,
        location=facts.repo_id or name,
        auto_class=auto_class,
        task=task,
        config=config,
        num_parameters=_count_parameters(folder),
        converted_from=facts.converted_from,
        labels=config.id2label if "Classification" in auto_class else {},
        metrics=metrics,
        data_names=data_names,
        evaluated_on=evaluated_on,
        recipe=yaml.safe_dump(recipe, allow_unicode=True, sort_keys=False) if recipe else "",
        transformers_version=transformers.__version__,
    )


def _figures(task: str, data_names: list[str], split: str, metrics: dict[str, float]) -> list[EvalResult]:
    data = data_names[-1] if data_names else "unnamed"  # the Hub asks for a name beside each figure
    return [
        EvalResult(
            task_type=task,
            dataset_type=data,
            dataset_name=data,
            dataset_split=split,
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in metrics.items()
    ]


def _metadata(name: str, task: str, facts: CardFacts, figures: list[EvalResult]) -> ModelCardData:
    """Return the block that the Hub reads; the figures become its model index."""
    return ModelCardData(
        language=facts.languages or None,
        license=facts.license or None,
        library_name="transformers",
        pipeline_tag=task,
        tags=["dsx_encoder", "encoder", "custom_code"],
        datasets=facts.datasets or None,  # the recipe's may be files, which the Hub would look for in vain
        base_model=facts.base_model or None,
        model_name=name,
        eval_results=figures or None,
    )


def _read_metrics(run: Path) -> tuple[str, dict[str, float]]:
    """Return split and figures of the run: those of the test split, else of the validation split, never both."""
    path = next((run / name for name in METRIC_FILES if (run / name).is_file()), None)
    found = json.loads(path.read_text(encoding="utf-8")) if path else {}
    for prefix, split in (("test_", "test"), ("eval_", "validation")):
        metrics = {
            key.removeprefix(prefix): float(value)
            for key, value in found.items()
            if key.startswith(prefix)
            and isinstance(value, int | float)
            and isfinite(value)
            and not any(word in key for word in SPEED_WORDS)
        }
        if metrics:
            return split, metrics
    return "test", {}


def _data_names(recipe: dict) -> list[str]:
    """Return what the recipe learned from; of a file its name."""
    sources = recipe.get("data") or recipe.get("texts") or []
    sources = sources.split(",") if isinstance(sources, str) else sources
    return [Path(source).name if Path(source).suffix else source for source in sources]


def _read_recipe(run: Path) -> dict:
    """Return the run's recipe without what is unset and without the folders of the machine it ran on."""
    path = run / RECIPE_FILE
    recipe = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {key: _without_folders(value) for key, value in (recipe or {}).items() if value is not None}


def _without_folders(value):
    if isinstance(value, list):
        return [_without_folders(entry) for entry in value]
    if isinstance(value, str):
        return ",".join(Path(part).name if Path(part).is_absolute() else part for part in value.split(","))
    return value


def _count_parameters(folder: Path) -> int:
    """Count from the files' headers; tied weights are stored, and counted, once."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            total += sum(prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118, no mapping
    return total
