"""Models in memory: a stock encoder as a DSX encoder, and back; weights move, nothing is computed.

- `to_dsx_model`: any stock class that families.py knows
- `to_stock_model`: any DSX class whose configuration the family can express
"""

import copy

import torch
from transformers import PreTrainedModel

from . import modeling_dsx_encoder as dsx_classes
from .configuration_dsx_encoder import DsxEncoderConfig
from .families import HEAD_NAMES, Family, find_family
from .key_map import Moved

# What a configuration says beside the architecture, the same on both sides.
TASK_FIELDS = ("id2label", "label2id", "problem_type")
# Cross encoders of sentence-transformers keep their activation here.
OPTIONAL_FIELDS = ("sentence_transformers",)


def dsx_class(name: str) -> type[PreTrainedModel]:
    """Our class of a head: `dsx_class("MaskedLM")`; "" for the trunk alone."""
    return getattr(dsx_classes, f"DsxEncoderFor{name}" if name else "DsxEncoderModel")


def head_name(architecture: str) -> str:
    """The head's name in the name of one of our classes.

    Raises:
        ValueError: It is none of them.
    """
    names = {dsx_class(name).__name__: name for name in HEAD_NAMES}
    if architecture not in names:
        raise ValueError(f"{architecture!r} is no class of this package; these are: {', '.join(names)}.")
    return names[architecture]


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a model saves."""
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def task_fields(config) -> dict:
    """Labels and problem type, for the configuration of the other side."""
    names = [*TASK_FIELDS, *(name for name in OPTIONAL_FIELDS if hasattr(config, name))]
    return {name: copy.deepcopy(getattr(config, name)) for name in names}


def to_dsx_model(model: PreTrainedModel, *, pooler: bool = True, **fields) -> tuple[PreTrainedModel, str, Moved]:
    """A DSX encoder with the weights of a stock one.

    Args:
        model: A model of transformers.
        pooler: Whether the pooler of a model without a head comes along; False where it was never trained.
        fields: Configuration fields to set besides, such as token ids that only the tokenizer knows.

    Returns:
        The model, the name of its head ("" for the trunk), and what became of the stock keys.

    Raises:
        ValueError: An unknown family or class, a configuration that has no counterpart, or weights without a place.
    """
    family = find_family(model.config.model_type)
    name, head = family.find_head(type(model).__name__)
    stock_config = copy.deepcopy(model.config)
    stock_config.architectures = [type(model).__name__]
    values = family.to_dsx(stock_config) | task_fields(stock_config) | fields
    pooler_key = next((key for key, ours in head.keys.items() if not name and ours == "pooler.dense"), None)
    has_pooler = pooler_key is not None and f"{pooler_key}.weight" in model.state_dict()
    values["add_pooling_layer"] = values.get("add_pooling_layer", False) and (bool(name) or (has_pooler and pooler))
    config = DsxEncoderConfig(**values)
    converted = dsx_class(name)._from_config(config, dtype=model.dtype)
    state = model.state_dict()
    if has_pooler and not pooler:
        state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{pooler_key}.")}
    moved = family.key_map(name, head, config).to_ours(state, shapes_of(converted))
    converted.load_state_dict(moved.state)
    return converted.eval(), name, moved


def to_stock_model(model: PreTrainedModel, family: Family) -> tuple[PreTrainedModel, str, Moved]:
    """A stock encoder with the weights of a DSX one.

    Returns:
        The model, the name of the head, and what became of the keys.

    Raises:
        ValueError: The family has no such head, or its configuration cannot say what this model computes; the message
            names the fields with both values.
    """
    name = head_name(type(model).__name__)
    if name not in family.heads:
        raise ValueError(f"the family {family.name} has no class for {type(model).__name__} in transformers.")
    different = family.differences(model.config, name)
    if different:
        reasons = "; ".join(f"{key} is {ours!r}, there {stock!r}" for key, (ours, stock) in different.items())
        raise ValueError(
            f"a {family.name} configuration cannot say what this model computes: {reasons}. Take another family, or "
            "keep the DSX folder."
        )
    head = family.heads[name]
    stock_config = family.config_class(**family.from_dsx(model.config), **task_fields(model.config))
    options = {}
    if not name and not model.config.add_pooling_layer and "pooler.dense" in head.keys:
        options["add_pooling_layer"] = False
    stock_config.dtype = model.dtype
    stock = family.stock_class(head)(stock_config, **options).to(model.dtype)
    moved = family.key_map(name, head, model.config).to_stock(model.state_dict(), shapes_of(stock))
    missing = torch.nn.Module.load_state_dict(stock, moved.state, strict=False).missing_keys
    moved.dropped = [key for key in moved.dropped if key in missing]
    return stock.eval(), name, moved
