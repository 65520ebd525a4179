"""Families of stock encoders that a DSX encoder can be: their configuration and their weights, both ways.

- `Family`: one `model_type` of transformers: the map of its trunk, its heads, two functions between configurations
- `find_family`, `family_names`: the families by their `model_type`
- `Family.differences`: what stands in the way of a DSX configuration as a stock one
"""

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import transformers

from .configuration_dsx_encoder import DsxEncoderConfig
from .key_map import KeyMap
from .presets import nearest

# Modules that define `FAMILIES`, a tuple of `Family`.
FAMILY_MODULES = ("families_bert", "families_kin", "families_modern")
# Our heads by the name in their class, and the Auto class that builds each.
HEAD_NAMES = (
    "", "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice",
)  # fmt: skip

# Fields on which the outputs depend, whatever the head.
TRUNK_FIELDS = (
    "vocab_size", "hidden_size", "embedding_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "hidden_act", "gated_mlp", "mlp_bias", "attention_bias", "norm_position", "norm_type",
    "norm_eps", "norm_bias", "embedding_norm", "first_attention_norm", "position_embedding_type",
    "max_position_embeddings", "position_offset", "type_vocab_size", "scale_embeddings", "layer_types",
)  # fmt: skip
RELATIVE_FIELDS = ("relative_attention_num_buckets", "relative_attention_max_distance")
CONDITIONAL_FIELDS = {
    "rope": ("rope_parameters",),
    "relative_bias": RELATIVE_FIELDS,
    "learned_relative_bias": RELATIVE_FIELDS,
}
PREDICTION_FIELDS = {
    "dense": ("prediction_activation", "classifier_bias"),
    "mlp": ("prediction_activation", "prediction_head_size"),
    "none": (),
}


def decisive_fields(config: DsxEncoderConfig, name: str) -> list[str]:
    """Fields on which the outputs of this model depend: those of its trunk and of its head `name`.

    Rates of dropout, initialisers and the fields of other heads are not among them.
    """
    fields = [*TRUNK_FIELDS, *CONDITIONAL_FIELDS.get(config.position_embedding_type, ())]
    if config.position_offset:
        fields.append("pad_token_id")  # stock models with an offset count positions by it
    if config.norm_type == "rms_norm":
        fields.remove("norm_bias")  # it has none
    if "sliding_attention" in config.layer_types:
        fields += ["sliding_window", "num_global_tokens"]
    if name == "MaskedLM":
        fields += ["tie_word_embeddings", "decoder_bias", "prediction_head"]
        return [*fields, *PREDICTION_FIELDS[config.prediction_head]]
    if not name and config.add_pooling_layer:
        fields += ["add_pooling_layer"]
    of_tokens = name in ("TokenClassification", "QuestionAnswering")
    pools = not of_tokens and (name or config.add_pooling_layer)
    fields += (["transform_tokens"] if of_tokens else []) + (["classifier_pooling"] if pools else [])
    if pools or (of_tokens and config.transform_tokens):
        fields += ["classifier_activation"]
        fields += ["classifier_bias", "classifier_norm"] if config.classifier_activation is not None else []
    return fields


@dataclass(frozen=True)
class Head:
    """One class of a family.

    Args:
        stock_class_name: Its name in `transformers`.
        keys: Full stock names of what lies outside the trunk -> our full names; `None` drops.
    """

    stock_class_name: str
    keys: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    Args:
        name: The `model_type`, also the value of `--to-family`.
        trunk_prefix: Attribute that holds the trunk in the stock heads, such as "bert".
        keys: The trunk's map, names relative to the trunk on both sides.
        heads: Classes by the name of our head, "" for the trunk alone; of each the one that goes back.
        to_dsx: Fields of a `DsxEncoderConfig` for a stock configuration, those of all heads. It may look at
            `architectures`, which always names the stock class.
        from_dsx: Fields of the stock configuration that comes nearest to a DSX one.
        pretraining: Further stock classes by the name of our head that takes their weights; they lose a head.
    """

    name: str
    trunk_prefix: str
    keys: dict[str, str | None]
    heads: dict[str, Head]
    to_dsx: Callable[[transformers.PreTrainedConfig], dict]
    from_dsx: Callable[[DsxEncoderConfig], dict]
    pretraining: dict[str, Head] = field(default_factory=dict)

    def find_head(self, stock_class_name: str) -> tuple[str, Head]:
        """Our head's name, and the entry, for a stock class.

        Raises:
            ValueError: The family has no such class here.
        """
        heads = [*self.heads.items(), *self.pretraining.items()]
        for name, head in heads:
            if head.stock_class_name == stock_class_name:
                return name, head
        known = ", ".join(head.stock_class_name for _, head in heads)
        raise ValueError(f"the {self.name} class {stock_class_name!r} has no DSX counterpart; these have: {known}.")

    def key_map(self, name: str, head: Head, config: DsxEncoderConfig) -> KeyMap:
        """The whole map of a head: its trunk under both prefixes, and what is the head's own."""
        stock, ours = (f"{self.trunk_prefix}.", "model.") if head is not self.heads[""] else ("", "")
        ours = ours if name else ""
        trunk = {f"{stock}{key}": target and f"{ours}{target}" for key, target in self.keys.items()}
        size = config.hidden_size // config.num_attention_heads
        qkv_sizes = (config.num_attention_heads * size, *[config.num_key_value_heads * size] * 2)
        return KeyMap(trunk | head.keys, qkv_sizes)

    def stock_class(self, head: Head) -> type[transformers.PreTrainedModel]:
        """The class in transformers."""
        return getattr(transformers, head.stock_class_name)

    @property
    def config_class(self) -> type[transformers.PreTrainedConfig]:
        """The configuration class in transformers."""
        return self.stock_class(self.heads[""]).config_class

    def differences(self, config: DsxEncoderConfig, name: str) -> dict[str, tuple]:
        """Fields in which the nearest stock configuration would not be this one: `{field: (ours, stock's)}`.

        Only what the outputs of the head depend on counts; {} means that the family can express the model.
        """
        stock = self.config_class(**self.from_dsx(with_head(config, name)))
        stock.architectures = [self.heads[name].stock_class_name]
        back = DsxEncoderConfig(**self.to_dsx(stock))
        fields = decisive_fields(config, name)
        pairs = {key: (getattr(config, key), getattr(back, key)) for key in fields}
        if "rope_parameters" in fields and back.position_embedding_type == "rope":
            kinds = sorted(set(config.layer_types))
            pairs["rope_parameters"] = (rope_by_kind(config, kinds), rope_by_kind(back, kinds))
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def with_head(config: DsxEncoderConfig, name: str) -> DsxEncoderConfig:
    """A copy whose `architectures` name the head, as some families have one field for the heads of all kinds."""
    config = copy.deepcopy(config)
    config.architectures = [f"DsxEncoderFor{name}" if name else "DsxEncoderModel"]
    return config


def rope_by_kind(config: DsxEncoderConfig, kinds: list[str]) -> dict[str, dict | None]:
    """RoPE parameters of layer types, however they are written down."""
    nested = config.nested_rope_parameter_keys(config.rope_parameters)
    return {kind: config.rope_parameters.get(kind) if nested else config.rope_parameters for kind in kinds}


@cache
def families() -> dict[str, Family]:
    """All families by name."""
    found = {}
    for name in FAMILY_MODULES:
        module = importlib.import_module(f".{name}", __package__)
        found |= {family.name: family for family in module.FAMILIES}
    return found


def find_family(name: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ValueError: No such family.
    """
    if name not in families():
        raise ValueError(
            f"model_type {name!r} is no family that can be converted: {nearest(name, families())}; all: "
            f"{', '.join(families())}."
        )
    return families()[name]
