"""Configuration of the DSX encoder.

One flat, typed list of fields. The bare `DsxEncoderConfig()` is the encoder of "Attention Is All You Need"
(https://arxiv.org/abs/1706.03762) as it is built today: 512 wide, 8 heads, 6 layers, Pre-LN, gated GELU without
biases, sinusoidal positions on scaled embeddings. BERT, RoBERTa, ModernBERT and their kin are other values of the
same fields.

- fields use the Hugging Face vocabulary; `attribute_map` also accepts the names of the literature (`d_model`, ...)
- values left at `None` are derived once, in `__post_init__`
- rules between fields are checked in `validate_architecture`, at construction and when saving
"""

import copy
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Written into every saved config, so that a checkpoint of one head loads through any Auto class.
AUTO_MAP = {
    "AutoConfig": "configuration_dsx_encoder.DsxEncoderConfig",
    "AutoModel": "modeling_dsx_encoder.DsxEncoderModel",
    "AutoModelForMaskedLM": "modeling_dsx_encoder.DsxEncoderForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_dsx_encoder.DsxEncoderForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_dsx_encoder.DsxEncoderForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_dsx_encoder.DsxEncoderForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_dsx_encoder.DsxEncoderForMultipleChoice",
}

POSITIVE_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "max_position_embeddings", "relative_attention_num_buckets",
    "relative_attention_max_distance", "embedding_size", "prediction_head_size",
)  # fmt: skip
NOT_NEGATIVE_FIELDS = ("position_offset", "type_vocab_size", "num_global_tokens", "initializer_range")
DROPOUT_FIELDS = ("embedding_dropout", "attention_dropout", "hidden_dropout", "mlp_dropout", "classifier_dropout")


@strict
class DsxEncoderConfig(PreTrainedConfig):
    """What a DSX encoder is made of; every field has a default, and `None` means "derived from the others".

    Args:
        vocab_size: Number of rows of the word embedding.
        hidden_size: Width E of the residual stream (`d_model`).
        embedding_size: Width of the embedding tables and of `embedding_norm`. `None`: E. Another one is mapped to E by
            a linear projection (ELECTRA, https://arxiv.org/abs/2003.10555).
        num_hidden_layers: Number of layers (`num_layers`).
        num_attention_heads: Number of query heads H (`num_heads`); must divide `hidden_size`. 1 is legal.
        num_key_value_heads: Number of key and value heads; must divide H. `None`: H. Fewer is grouped-query
            attention (https://arxiv.org/abs/2305.13245).
        intermediate_size: Inner width F of the feed-forward (`d_ff`). `None`: 4 E.
        hidden_act: Any name of `transformers.activations.ACT2FN`.
        gated_mlp: `down(act(gate(x)) * up(x))` (https://arxiv.org/abs/2002.05202); False: `down(act(up(x)))`.
        mlp_bias: Biases in the feed-forward.
        attention_bias: Biases in the query, key, value and output projections.
        norm_position: "pre" `x + f(norm(x))` with a final norm, or "post" `norm(x + f(x))`
            (https://arxiv.org/abs/2002.04745). "post" needs learning-rate warm-up.
        norm_type: "layer_norm" (https://arxiv.org/abs/1607.06450) or "rms_norm" (https://arxiv.org/abs/1910.07467).
        norm_eps: Added to the variance before the square root.
        norm_bias: Learned shift of the layer norms; RMSNorm has none.
        embedding_norm: Norm after the sum of the embeddings, as BERT and ModernBERT have.
        first_attention_norm: False: no norm before the attention of layer 0, since the embedding norm is one already
            (ModernBERT, https://arxiv.org/abs/2412.13663). Pre-LN only.
        position_embedding_type: How tokens know their place. "sinusoidal" and "learned" add a table row to the
            embedding, "rope" (https://arxiv.org/abs/2104.09864) rotates queries and keys, "relative_bias"
            (T5, https://arxiv.org/abs/1910.10683) and "alibi" (https://arxiv.org/abs/2108.12409) shift the scores;
            "learned_relative_bias" does both (MPNet, https://arxiv.org/abs/2004.09297).
        max_position_embeddings: Rows of the sinusoidal or learned table (`max_len`), in tokens; for the other schemes
            the length the model is trained for, which they may pass.
        position_offset: Table row of the first token; RoBERTa starts at `pad_token_id + 1`.
        rope_parameters: `rope_type`, `rope_theta` and what the type needs, as in transformers; or one such dict per
            layer type. Only with position_embedding_type="rope".
        relative_attention_num_buckets: Buckets of the T5 bias, half of them for each direction.
        relative_attention_max_distance: Distance in tokens from which on all share the last bucket.
        type_vocab_size: Rows of the token type (segment) embedding; 0: none, and token_type_ids are not looked at.
        scale_embeddings: Multiply word embeddings by sqrt(E), the 2017 rule. `None`: only with "sinusoidal".
        layer_types: "full_attention" or "sliding_attention" for each layer. `None`: all full.
        sliding_window: Radius of the sliding layers in tokens, inclusive: i sees j iff |i - j| <= sliding_window.
        num_global_tokens: So many leading tokens of each sequence see all and are seen by all in sliding layers
            (Longformer, https://arxiv.org/abs/2004.05150).
        embedding_dropout: Rate after the embeddings.
        attention_dropout: Rate on the attention weights. Above 0, SDPA on a GPU trains on padding too.
        hidden_dropout: Rate on the output of each sub-layer, before the residual sum.
        mlp_dropout: Rate inside the feed-forward, after the activation.
        classifier_dropout: Rate before the classifier of the heads. `None`: `hidden_dropout`.
        add_pooling_layer: The base model pools too, and returns `pooler_output` (BERT).
        classifier_pooling: How a sequence becomes one vector: first real token ("cls"), "mean" or "max" over real
            tokens; "late": the mean of the transformed tokens (EuroBERT, https://arxiv.org/abs/2503.05500).
        classifier_activation: After the linear map of the pooled vector, in front of the classifier. `None`: no map,
            the classifier reads the pooled vector itself.
        classifier_bias: Bias of that map, and of the one in the masked-LM head.
        classifier_norm: A norm after that activation.
        transform_tokens: Token classification and question answering send each token through such a map too.
        prediction_head: What masked LM does in front of its decoder: "dense" (map, activation, norm, as in BERT),
            "mlp" (two maps without biases, an activation after each, as in UltraBERT) or "none" (EuroBERT).
        prediction_activation: Activation of the masked-LM head. `None`: `hidden_act`.
        prediction_head_size: Width between the two maps of "mlp". `None`: E.
        decoder_bias: A bias for each piece of the vocabulary in the masked-LM head.
        initializer: "normal", "xavier_uniform" (linear maps) or "scaled_normal", which divides the standard deviation
            of the two maps that write into the residual stream by sqrt(2 * num_hidden_layers).
        initializer_range: Standard deviation of the normal initialisers.
        tie_word_embeddings: The masked-LM decoder shares the word embedding.
        padding_free: Compute padded and packed batches on their real tokens alone where that serves (`choose_layout`);
            the outputs are the same.
        sparse_prediction: Masked LM computes vocabulary logits only at labelled tokens while training, and keeps none:
            its `logits` are then None. Evaluation, and training without labels, give `(B, L, vocab_size)`.

    Raises:
        ValueError: A rule between fields is broken; the message names both values.
        huggingface_hub.errors.StrictDataclassFieldValidationError: A value has the wrong type.
    """

    model_type = "dsx_encoder"
    attribute_map: ClassVar[dict[str, str]] = {
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_layers": "num_hidden_layers",
        "d_ff": "intermediate_size",
        "feedforward_size": "intermediate_size",
        "max_len": "max_position_embeddings",
    }
    # Queries, keys and values share one matrix, whose shards do not fall on head borders: gather it, split after.
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.attention.qkv_proj": "colwise_gather_output",
        "layers.*.attention.out_proj": "rowwise_split_input",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_fsdp_plan: ClassVar[dict[str, str]] = {
        "embeddings": "free_full_weight",
        "layers.*": "free_full_weight",
        "final_norm": "keep_full_weight",
    }

    vocab_size: int = 30522
    hidden_size: int = 512
    embedding_size: int | None = None
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    gated_mlp: bool = True
    mlp_bias: bool = False
    attention_bias: bool = False
    norm_position: Literal["pre", "post"] = "pre"
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_eps: float = 1e-5
    norm_bias: bool = True
    embedding_norm: bool = False
    first_attention_norm: bool = True
    position_embedding_type: Literal[
        "sinusoidal", "learned", "rope", "relative_bias", "learned_relative_bias", "alibi", "none"
    ] = "sinusoidal"
    max_position_embeddings: int = 512
    position_offset: int = 0
    rope_parameters: dict | None = None
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    type_vocab_size: int = 0
    scale_embeddings: bool | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    num_global_tokens: int = 0
    embedding_dropout: float | int = 0.1
    attention_dropout: float | int = 0.1
    hidden_dropout: float | int = 0.1
    mlp_dropout: float | int = 0.0
    classifier_dropout: float | int | None = None
    add_pooling_layer: bool = False
    classifier_pooling: Literal["cls", "mean", "max", "late"] = "cls"
    classifier_activation: str | None = "tanh"
    classifier_bias: bool = True
    classifier_norm: bool = False
    transform_tokens: bool = False
    prediction_head: Literal["dense", "mlp", "none"] = "dense"
    prediction_activation: str | None = None
    prediction_head_size: int | None = None
    decoder_bias: bool = True
    initializer: Literal["normal", "xavier_uniform", "scaled_normal"] = "normal"
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = True
    padding_free: bool = True
    sparse_prediction: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    cls_token_id: int | None = None
    sep_token_id: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self, **kwargs):
        # Aliases first: what is derived below must see them.
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        if self.prediction_activation is None:
            self.prediction_activation = self.hidden_act
        if self.prediction_head_size is None:
            self.prediction_head_size = self.hidden_size
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.scale_embeddings is None:
            self.scale_embeddings = self.position_embedding_type == "sinusoidal"
        # A list or dict handed in stays the caller's own.
        self.layer_types = list(self.layer_types or ["full_attention"] * self.num_hidden_layers)
        if not self.gated_mlp:  # a plan may name existing parameters only
            self.base_model_tp_plan = {k: v for k, v in self.base_model_tp_plan.items() if "gate_proj" not in k}
        kwargs["auto_map"] = AUTO_MAP | (kwargs.get("auto_map") or {})
        super().__post_init__(**kwargs)
        # @strict repeats this and wraps what it raises; called here, a broken rule is a plain ValueError.
        self.validate_architecture()

    def convert_rope_params_to_dict(self, **kwargs):
        """Fill in `rope_parameters` for "rope" only; elsewhere the field stays as it was given."""
        if self.position_embedding_type != "rope":
            return kwargs
        self.rope_parameters = copy.deepcopy(self.rope_parameters)
        return super().convert_rope_params_to_dict(**kwargs)

    def validate_rope(self):
        """Check what a `rope_type` needs, by transformers' own rules.

        Raises:
            ValueError: A parameter that the type needs is missing.
        """
        try:
            super().validate_rope()
        except KeyError as error:
            raise ValueError(f"rope_parameters ({self.rope_parameters}) is incomplete: {error.args[0]}") from error

    # transformers refuses `output_attentions=True` beside SDPA. This encoder returns real weights under every
    # attention implementation, so here the value is only kept.
    @property
    def output_attentions(self):
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool):
        self._output_attentions = value

    def validate_output_attentions(self):
        """Nothing to refuse: weights are returned under every attention implementation."""

    def validate_architecture(self):
        """Check the rules between fields, at construction and (by `@strict`) when saving.

        Raises:
            ValueError: Naming the fields, their values and the way out.
        """
        super().validate_architecture()
        self._validate_ranges()
        self._validate_heads()
        self._validate_positions()
        self._validate_layer_types()
        self._validate_classifier()

    def _validate_ranges(self):
        for name in POSITIVE_FIELDS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in NOT_NEGATIVE_FIELDS:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")
        for name in DROPOUT_FIELDS:
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < 1:
                raise ValueError(f"{name} is a rate and must lie in [0, 1), got {rate}.")
        if self.norm_eps <= 0:
            raise ValueError(f"norm_eps must be positive, got {self.norm_eps}.")
        for name in ("hidden_act", "prediction_activation", "classifier_activation"):
            act = getattr(self, name)
            if act not in ACT2FN and not (act is None and name == "classifier_activation"):
                raise ValueError(f"{name} {act!r} is unknown; transformers knows {sorted(ACT2FN)}.")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id ({self.pad_token_id}) must be a row of the embedding, 0 to vocab_size - 1 "
                f"({self.vocab_size - 1}); raise vocab_size or set pad_token_id=None."
            )

    def _validate_heads(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads}), so that every head gets hidden_size / num_attention_heads features."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads}), so that each key head serves equally many query heads."
            )

    def _validate_positions(self):
        if self.position_embedding_type == "rope":
            head_size = self.hidden_size // self.num_attention_heads
            if head_size % 2:
                raise ValueError(
                    f"position_embedding_type 'rope' rotates pairs of features, but the head size hidden_size / "
                    f"num_attention_heads = {self.hidden_size} / {self.num_attention_heads} = {head_size} is odd."
                )
            nested = self.nested_rope_parameter_keys(self.rope_parameters or {})
            for parameters in [self.rope_parameters[key] for key in nested] or [self.rope_parameters or {}]:
                rope_type = parameters.get("rope_type", "default")
                if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
                    raise ValueError(
                        f"rope_parameters has rope_type {rope_type!r}; transformers knows 'default' and "
                        f"{sorted(ROPE_INIT_FUNCTIONS)}."
                    )
            # A dict per layer type must name every type in use: none may fall back to a default in silence.
            missing = sorted(set(self.layer_types) - set(nested)) if nested else []
            if missing:
                raise ValueError(
                    f"rope_parameters is given per layer type for {sorted(nested)}, but layer_types also has "
                    f"{missing}; add an entry for {missing}, or give one flat dict for all layers."
                )
        elif self.rope_parameters:
            raise ValueError(
                f"rope_parameters ({self.rope_parameters}) needs position_embedding_type='rope', "
                f"got {self.position_embedding_type!r}; remove one of the two."
            )
        if self.position_embedding_type in ("relative_bias", "learned_relative_bias"):
            # T5: half of the buckets for each direction, half of those for exact distances, the rest logarithmic.
            exact = self.relative_attention_num_buckets // 4
            if self.relative_attention_num_buckets % 2 or exact < 1 or self.relative_attention_max_distance <= exact:
                raise ValueError(
                    f"relative_attention_num_buckets ({self.relative_attention_num_buckets}) must be even and at "
                    f"least 4, and relative_attention_max_distance ({self.relative_attention_max_distance}) greater "
                    "than a quarter of it."
                )

    def _validate_layer_types(self):
        known = ("full_attention", "sliding_attention")
        unknown = [layer_type for layer_type in self.layer_types if layer_type not in known]
        if unknown:
            raise ValueError(f"layer_types has {unknown[0]!r}; each entry must be one of {known}.")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries, but num_hidden_layers is {self.num_hidden_layers}; "
                "give one entry per layer, or leave layer_types out for full attention everywhere."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window must be a radius of at least 1 token, got {self.sliding_window}; for attention "
                "without a window use layer_types 'full_attention'."
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError(
                "layer_types has 'sliding_attention', but sliding_window is None; set sliding_window to the radius in "
                "tokens that a position sees on each side."
            )

    def _validate_classifier(self):
        if self.classifier_activation is None and (self.classifier_norm or self.transform_tokens):
            raise ValueError(
                f"classifier_norm ({self.classifier_norm}) and transform_tokens ({self.transform_tokens}) belong to a "
                "linear map in front of the classifier, and classifier_activation=None takes that map away; name an "
                "activation, such as 'tanh' or 'linear'."
            )
        if self.prediction_head == "none" and self.embedding_size != self.hidden_size:
            raise ValueError(
                f"prediction_head 'none' sends hidden states of hidden_size ({self.hidden_size}) to a decoder of "
                f"embedding_size ({self.embedding_size}); make the two equal, or take prediction_head 'dense'."
            )
        if not self.first_attention_norm and self.norm_position != "pre":
            raise ValueError(
                f"first_attention_norm=False takes the norm before the first attention away, but norm_position is "
                f"{self.norm_position!r}, which has none there; set first_attention_norm=True."
            )


__all__ = ["AUTO_MAP", "DsxEncoderConfig"]
