"""Families of stock encoders that a DSX encoder can be: their configuration and their weights, both ways.

- `Family`: one `model_type` of transformers: the map of its trunk, its heads, two functions between configurations
- `find_family`, `family_names`: the families by their `model_type`
- `Family.differences`: what stands in the way of a DSX configuration as a stock one
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import transformers

from .configuration_dsx_encoder import DsxEncoderConfig
from .key_map import KeyMap
from .presets import nearest

# Modules that define `FAMILIES`, a tuple of `Family`.
FAMILY_MODULES = ("families_bert", "families_modern")
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
# Fields that count only beside a value of another one.
CONDITIONAL_FIELDS = {
    "rope_parameters": ("position_embedding_type", ("rope",)),
    "relative_attention_num_buckets": ("position_embedding_type", ("relative_bias", "learned_relative_bias")),
    "relative_attention_max_distance": ("position_embedding_type", ("relative_bias", "learned_relative_bias")),
}
WINDOW_FIELDS = ("sliding_window", "num_global_tokens")
POOLER_FIELDS = ("classifier_pooling", "classifier_activation", "classifier_bias", "classifier_norm")
TRANSFORM_FIELDS = ("classifier_activation", "classifier_bias", "classifier_norm")
HEAD_FIELDS = {
    "": (),
    "MaskedLM": (
        "prediction_activation", "prediction_head", "prediction_head_size", "decoder_bias", "classifier_bias",
        "tie_word_embeddings",
    ),
    "SequenceClassification": POOLER_FIELDS,
    "TokenClassification": ("transform_tokens",),
    "QuestionAnswering": ("transform_tokens",),
    "MultipleChoice": POOLER_FIELDS,
}  # fmt: skip


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
        stock = self.config_class(**self.from_dsx(config))
        stock.architectures = [self.heads[name].stock_class_name]
        back = DsxEncoderConfig(**self.to_dsx(stock))
        fields = [*TRUNK_FIELDS, *HEAD_FIELDS[name]]
        fields += [key for key, (other, values) in CONDITIONAL_FIELDS.items() if getattr(config, other) in values]
        fields += WINDOW_FIELDS if "sliding_attention" in config.layer_types else ()
        fields += POOLER_FIELDS if not name and getattr(config, "add_pooling_layer", False) else ()
        fields += (
            TRANSFORM_FIELDS if "transform_tokens" in fields and getattr(config, "transform_tokens", False) else ()
        )
        pairs = {key: (effective(config, key), effective(back, key)) for key in dict.fromkeys(fields)}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def effective(config: DsxEncoderConfig, key: str):
    """The value of a field that the model computes with."""
    value = getattr(config, key, None)
    if key == "prediction_activation" and value is None:
        return config.hidden_act
    if key == "embedding_size" and value is None:
        return config.hidden_size
    if key == "norm_bias" and config.norm_type == "rms_norm":
        return False  # RMSNorm has no shift
    return value


@cache
def families() -> dict[str, Family]:
    """All families by name."""
    found = {}
    for name in FAMILY_MODULES:
        try:
            module = importlib.import_module(f".{name}", __package__)
        except ModuleNotFoundError as error:
            if error.name != f"{__package__}.{name}":
                raise
            continue
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
