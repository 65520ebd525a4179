"""Model and tokenizer that a run starts from: a checkpoint with its own, or a preset with new weights.

- `load_tokenizer`, `load_model`: what `ModelArguments` names, fitted to each other (vocabulary, special ids, length)
- `limit_rows`, `limit_splits`: parts of data sets, for a quick try
"""

import logging
from contextlib import contextmanager
from pathlib import Path

from datasets import Dataset, DatasetDict
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .presets import load_preset, nearest
from .recipe import DataArguments, ModelArguments, require

logger = logging.getLogger(__name__)

SPECIAL_IDS = ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id", "bos_token_id", "eos_token_id")


@contextmanager
def naming_source(field: str, source: str):
    """Turns transformers' error about the connection into one about the field."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{field}={source!r} is no folder (from {Path.cwd()}) with the files it needs, and the Hub gave none: "
            f"{str(error).splitlines()[0]} Check the path, or run the script that writes the folder first"
        ) from error


def load_tokenizer(arguments: ModelArguments) -> PreTrainedTokenizerBase:
    """The tokenizer named in the arguments, or the checkpoint's own."""
    if arguments.checkpoint is None:
        require(arguments, "preset", "tokenizer")
    source = arguments.tokenizer or arguments.checkpoint
    revision = arguments.revision if source == arguments.checkpoint else None
    hub = {"revision": revision or "main", "trust_remote_code": arguments.trust_remote_code}
    with naming_source("tokenizer" if arguments.tokenizer else "checkpoint", source):
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"tokenizer {source!r} has no pad_token, but rows of a batch are padded to one length: "
            "add one (tokenizer.pad_token = ...), or train a tokenizer with scripts/train_tokenizer.py"
        )
    return tokenizer


def load_model(
    arguments: ModelArguments, auto_class: type, tokenizer: PreTrainedTokenizerBase, **config_kwargs
) -> PreTrainedModel:
    """The model of a run; the tokenizer's maximum becomes what the model can read.

    Args:
        auto_class: Which head, such as AutoModelForMaskedLM.
        config_kwargs: What the task sets: num_labels, id2label, problem_type, ...
    """
    options = {}
    if arguments.attn_implementation is not None:
        options["attn_implementation"] = arguments.attn_implementation
    if arguments.checkpoint is None:
        special = {name: getattr(tokenizer, name, None) for name in SPECIAL_IDS}
        fitted = {"vocab_size": len(tokenizer)} | special | config_kwargs | arguments.parsed_overrides()
        config = load_preset(arguments.preset, **fitted)
        fit_tokenizer(tokenizer, config)
        return auto_class.from_config(config, **options)
    hub = {"revision": arguments.revision or "main", "trust_remote_code": arguments.trust_remote_code}
    with naming_source("checkpoint", arguments.checkpoint):
        config = AutoConfig.from_pretrained(arguments.checkpoint, **hub)
    for name, value in arguments.parsed_overrides().items():
        if not hasattr(config, name):
            raise ValueError(f"overrides names the unknown field {name!r}: {nearest(name, config.to_dict())}")
        setattr(config, name, value)
    config.problem_type = None  # that of an earlier task would choose the loss of this one
    for name, value in config_kwargs.items():
        setattr(config, name, value)
    fit_tokenizer(tokenizer, config)
    # A head for other labels than the checkpoint's is made anew; transformers says so in its report.
    model = auto_class.from_pretrained(
        arguments.checkpoint, config=config, ignore_mismatched_sizes=True, **hub, **options
    )
    freeze(model, arguments.num_frozen_layers)
    return model


def freeze(model: PreTrainedModel, num_layers: int) -> None:
    """Keeps embeddings and the first `num_layers` layers as they are; they then cost a forward and no backward.

    Raises:
        ValueError: More layers than there are, a negative number, or a model whose layers are not found.
    """
    if not num_layers:
        return
    trunk = model.base_model
    layers = getattr(trunk, "layers", None)
    if layers is None:
        raise ValueError(
            f"num_frozen_layers={num_layers} is for DSX encoders, and {type(trunk).__name__} keeps its layers "
            "elsewhere: convert the checkpoint with scripts/convert_checkpoint.py, or leave num_frozen_layers out"
        )
    if not 0 < num_layers <= len(layers):
        raise ValueError(f"num_frozen_layers={num_layers} must lie between 0 and the number of layers, {len(layers)}")
    for module in (trunk.embeddings, trunk.positions, *layers[:num_layers]):
        module.requires_grad_(False)


def fit_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Refuses a tokenizer with more pieces than the model has embeddings; caps its maximum at the model's."""
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} pieces, but the model has vocab_size={config.vocab_size}: "
            "take the tokenizer that the checkpoint was trained with, or a preset for new weights"
        )
    # RoBERTa counts its unused first rows among max_position_embeddings.
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and tokenizer.model_max_length > limit:
        logger.info("tokenizer.model_max_length falls from %s to the model's %s", tokenizer.model_max_length, limit)
        tokenizer.model_max_length = limit


def limit_rows(dataset: Dataset, num_rows: int | None, seed: int = 0) -> Dataset:
    """At most `num_rows` rows, chosen by `seed`; all of them for None."""
    if num_rows is None or num_rows >= len(dataset):
        return dataset
    if num_rows < 1:
        raise ValueError(f"{num_rows} rows are asked for: give max_train_samples and max_eval_samples of 1 or more")
    return dataset.shuffle(seed=seed).select(range(num_rows))


def limit_splits(splits: DatasetDict, arguments: DataArguments, seed: int = 0) -> DatasetDict:
    """At most max_train_samples rows of train, and max_eval_samples of each other split."""
    limits = dict.fromkeys(splits, arguments.max_eval_samples) | {"train": arguments.max_train_samples}
    return DatasetDict({name: limit_rows(rows, limits[name], seed) for name, rows in splits.items()})
