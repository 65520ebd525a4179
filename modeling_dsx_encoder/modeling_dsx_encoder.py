"""The DSX encoder: a Transformer encoder read from top to bottom.

- one attention with a fused query-key-value projection, grouped-query heads and every back end of transformers
- one feed-forward, gated or classic, with any activation of transformers
- one layer, Pre-LN or Post-LN; LayerNorm or RMSNorm
- `DsxEncoderModel`, the trunk, and five heads: masked LM, sequence, token, question answering, multiple choice
- one row of logits for each sequence of packed rows (traced, for each row: shapes must not follow the positions)
- losses that divide by the number of items of the whole accumulated batch

A token's way: `DsxEncoderModel.forward` makes a layout from the inputs (`layouts_dsx_encoder.py`), then embeddings,
layers and final norm run on tensors whose leading axes they do not look at. Only attention asks the layout.

Shapes: B batch, L sequence, E hidden_size, F intermediate_size, H heads, K key-value heads, D = E/H head size,
W embedding_size (E unless the tables are narrower), V vocab_size, N number of labels.
"""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_dsx_encoder import RectangularLayout, eager_attention_forward
from .configuration_dsx_encoder import DsxEncoderConfig
from .layouts_dsx_encoder import choose_layout
from .losses_dsx_encoder import (
    IGNORE_INDEX,
    answer_labels,
    check_indices,
    check_label_shape,
    cross_entropy_loss,
    sequence_loss,
    token_labels,
)
from .positions_dsx_encoder import POSITION_SCHEMES, PositionScheme, is_traced, rotate

# Without gradients the feed-forward keeps at most so many inner activations, 16 MiB in fp32.
MAX_INNER_ELEMENTS = 2**22
# While training, masked LM makes at most so many logits at once, 8 MiB in fp32.
MAX_LOGITS = 2**21


def build_norm(config: DsxEncoderConfig, size: int | None = None) -> nn.Module:
    """LayerNorm (biased variance, arXiv:1607.06450) or RMSNorm (arXiv:1910.07467) over `size` features, or over E."""
    size = config.hidden_size if size is None else size
    if config.norm_type == "rms_norm":
        return nn.RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.norm_bias)


class DsxEncoderDropout(nn.Dropout):
    """Dropout (https://jmlr.org/papers/v15/srivastava14a.html) whose masks cost a third of torch's on a CPU.

    There torch draws one number for each element, one after the other; here one draw of 64 bits serves four elements,
    so that the rate is a multiple of 2^-16.
    """

    def forward(self, input):
        if not self.training or not 2**-16 <= self.p < 1 - 2**-16 or input.device.type != "cpu" or is_traced():
            return super().forward(input)
        draws = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        bits = draws.view(torch.int16)[: input.numel()].view(input.shape)
        num_dropped = round(self.p * 2**16)  # of the 2^16 values, which begin at -2^15
        keep = bits >= num_dropped - 2**15
        return input * keep.to(input.dtype).mul_(2**16 / (2**16 - num_dropped))


class DsxEncoderEmbeddings(nn.Module):
    """Words, token types and positions become vectors: sum, norm if asked for, dropout, and a map to E if narrower."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__()
        size = config.embedding_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size)
        self.token_type_embeddings = None
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.norm = build_norm(config, size) if config.embedding_norm else nn.Identity()
        self.dropout = DsxEncoderDropout(config.embedding_dropout)
        self.projection = nn.Identity() if size == config.hidden_size else nn.Linear(size, config.hidden_size)
        # Section 3.4 of arXiv:1706.03762: without the factor the positions drown the words.
        self.scale = math.sqrt(size) if config.scale_embeddings else 1.0

    def forward(self, input_ids, inputs_embeds, token_type_ids, positions, position_ids):
        embeddings = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds  # (..., W)
        if self.scale != 1.0:
            embeddings = embeddings * self.scale
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                embeddings = embeddings + self.token_type_embeddings.weight[0]
            else:
                embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        embeddings = positions.add_to_embeddings(embeddings, position_ids)
        return self.projection(self.dropout(self.norm(embeddings)))  # (..., E)


class DsxEncoderAttention(nn.Module):
    """Multi-head attention: project to queries, keys and values at once, attend, project back."""

    # Every token sees both sides; left unset, SDPA may take the causal kernel.
    is_causal = False

    def __init__(self, config: DsxEncoderConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        num_projected = (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, num_projected, bias=config.attention_bias)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)
        # For the initialisers: three maps in one matrix, each with a fan-out of E; and a map into the residual stream.
        self.qkv_proj.fan_out = config.hidden_size
        self.out_proj.writes_residual = True

    def forward(self, hidden_states, layout, *masks):
        """Hidden states `(..., E)` to the same shape, and the weights `(B, H, L, L)` where the back end gives them."""
        num_projected = self.num_heads + 2 * self.num_key_value_heads
        projected = self.qkv_proj(hidden_states)
        heads = projected.to(layout.attends_in or projected.dtype).unflatten(-1, (num_projected, self.head_dim))
        # (..., H, D), and (..., K, D) twice
        query, key, value = heads.split([self.num_heads, self.num_key_value_heads, self.num_key_value_heads], dim=-2)
        rotation = layout.rotations[self.layer_type]
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            layout.attn_implementation, eager_attention_forward
        )
        with layout.precision(projected):
            output, weights = layout.attend(attention_interface, self, query, key, value, masks)  # (..., E)
        return self.out_proj(output.to(projected.dtype)), weights


class DsxEncoderMLP(nn.Module):
    """Feed-forward: `down(act(gate(x)) * up(x))` (arXiv:2002.05202), or the classic `down(act(up(x)))`."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__()
        if config.gated_mlp:
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.down_proj.writes_residual = True  # for the initialisers
        self.act_fn = ACT2FN[config.hidden_act]
        self.dropout = DsxEncoderDropout(config.mlp_dropout)
        self.gated = config.gated_mlp

    def forward(self, hidden_states):
        at_once = max(MAX_INNER_ELEMENTS // self.up_proj.out_features, 1)
        tokens = hidden_states.flatten(0, -2)
        if torch.is_grad_enabled() or is_traced() or len(tokens) <= at_once:
            return self.feed(hidden_states)
        # A long text goes through in parts: inner activations of more than some megabytes are new memory every time.
        return torch.cat([self.feed(part) for part in tokens.split(at_once)]).view(hidden_states.shape)

    def feed(self, hidden_states):
        """The feed-forward of tokens `(..., E)`."""
        if self.gated:
            inner, up = self.act_fn(self.gate_proj(hidden_states)), self.up_proj(hidden_states)  # (..., F)
            # In place where no gradient needs both factors: fresh memory costs more than the product itself.
            inner = inner * up if torch.is_grad_enabled() or is_traced() else inner.mul_(up)
        else:
            inner = self.act_fn(self.up_proj(hidden_states))
        return self.down_proj(self.dropout(inner))


class DsxEncoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each with a residual connection; norms before ("pre") or after ("post")."""

    def __init__(self, config: DsxEncoderConfig, layer_idx: int):
        super().__init__()
        bare = layer_idx == 0 and not config.first_attention_norm
        self.attention_norm = nn.Identity() if bare else build_norm(config)
        self.attention = DsxEncoderAttention(config, layer_idx)
        self.mlp_norm = build_norm(config)
        self.mlp = DsxEncoderMLP(config)
        self.dropout = DsxEncoderDropout(config.hidden_dropout)
        self.pre_norm = config.norm_position == "pre"

    def forward(self, hidden_states, layout, *masks):
        if self.pre_norm:
            hidden_states = hidden_states + self.dropout(
                self.attention(self.attention_norm(hidden_states), layout, *masks)[0]
            )
            return hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states)))
        attended = self.attention(hidden_states, layout, *masks)[0]
        hidden_states = self.attention_norm(hidden_states + self.dropout(attended))
        return self.mlp_norm(hidden_states + self.dropout(self.mlp(hidden_states)))


class DsxEncoderTransform(nn.Module):
    """What stands in front of a classifier: map, activation and, as in ModernBERT, a norm; or nothing."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__()
        self.act_fn = None
        if config.classifier_activation is not None:
            self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
            self.act_fn = ACT2FN[config.classifier_activation]
            self.norm = build_norm(config) if config.classifier_norm else nn.Identity()

    def forward(self, hidden_states):
        return hidden_states if self.act_fn is None else self.norm(self.act_fn(self.dense(hidden_states)))


class DsxEncoderPooler(DsxEncoderTransform):
    """One vector per sequence, pooled by the layout, through the transform: linear and tanh in BERT."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__(config)
        self.pooling = config.classifier_pooling

    def forward(self, hidden_states, layout):
        if self.pooling == "late":  # a linear classifier of the mean is the mean of EuroBERT's answers for each token
            return layout.pool(super().forward(hidden_states), "mean")
        return super().forward(layout.pool(hidden_states, self.pooling))  # (number of sequences, E)


class DsxEncoderPreTrainedModel(PreTrainedModel):
    """What all DSX encoder classes tell transformers about themselves, and their initialisation."""

    config_class = DsxEncoderConfig
    config: DsxEncoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DsxEncoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DsxEncoderLayer, "attentions": DsxEncoderAttention}

    @torch.no_grad()
    def _init_weights(self, module):
        """Normal(0, initializer_range) and zero biases by transformers, then what the configuration asks beyond.

        Decided on the module that owns the parameter: transformers never hands in custom code's modules without any.
        """
        super()._init_weights(module)
        config = self.config
        if isinstance(module, PositionScheme):
            for name, table in module.tables().items():
                init.copy_(getattr(module, name), table)
        elif isinstance(module, nn.Linear) and config.initializer == "xavier_uniform":
            fan_out = getattr(module, "fan_out", module.out_features)
            bound = math.sqrt(6.0 / (module.in_features + fan_out))
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.Linear) and config.initializer == "scaled_normal":
            if getattr(module, "writes_residual", False):
                # 2 num_hidden_layers terms are summed in the residual stream (GPT-2's rule).
                init.normal_(module.weight, std=config.initializer_range / math.sqrt(2 * config.num_hidden_layers))
        elif module.__class__.__module__.startswith(("torch.nn.modules.activation", "transformers.activations")):
            # Some activations learn or keep values of their own (PReLU, xIELU): those of a new one.
            names = (config.hidden_act, config.prediction_activation, config.classifier_activation)
            activations = [ACT2FN[name] for name in names if name is not None]
            fresh = next(act for act in activations if type(act) is type(module)).state_dict()
            for name, value in module.state_dict(keep_vars=True).items():
                init.copy_(value, fresh[name])

    def encode(self, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs):
        """Run the trunk for a head: its outputs in the layout's arrangement, and the layout that brings them back."""
        layout = self.model.layout(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        kwargs["return_dict"] = True
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, layout=layout, **kwargs
        )
        device = outputs.last_hidden_state.device  # the last layer's, where a model lies on several devices
        return outputs, layout if layout.ranks.device == device else layout.to(device)

    def get_input_embeddings(self):
        return self.base_model.embeddings.word_embeddings

    def set_input_embeddings(self, value):
        self.base_model.embeddings.word_embeddings = value


class DsxEncoderModel(DsxEncoderPreTrainedModel):
    """The trunk: embeddings, layers and, for Pre-LN, a final norm; on its own also BERT's pooler, if asked for."""

    def __init__(self, config: DsxEncoderConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        self.embeddings = DsxEncoderEmbeddings(config)
        self.positions = POSITION_SCHEMES[config.position_embedding_type](config)
        self.layers = nn.ModuleList(DsxEncoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()
        if add_pooling_layer is None:  # heads say False: they pool for themselves, under the same name in the file
            add_pooling_layer = config.add_pooling_layer
        self.pooler = DsxEncoderPooler(config) if add_pooling_layer else None
        self.gradient_checkpointing = False
        self.post_init()

    def layout(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        """Where the tokens of these inputs stand; heads make it once, for the trunk and for their pooling.

        Args:
            input_ids: `(B, L)`.
            attention_mask: See `forward`.
            position_ids: See `forward`.
            inputs_embeds: `(B, L, W)` in place of input_ids.
            kwargs: `cu_seq_lens_q` of packed rows and `output_attentions` are looked at.

        Raises:
            ValueError: Not exactly one of input_ids and inputs_embeds, or shapes that do not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "Give exactly one of input_ids and inputs_embeds, got "
                f"{'neither' if input_ids is None else 'both'}: the encoder reads either token numbers or vectors."
            )
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        wanted = 2 if inputs_embeds is None else 3
        if tokens.ndim != wanted:
            name, shape = ("input_ids", "(batch, length)") if wanted == 2 else ("inputs_embeds", "(batch, length, E)")
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tokens.shape)}; add the batch axis.")
        wants = {}
        for name in ("output_attentions", "output_hidden_states"):
            wanted = kwargs.get(name)
            wants[name] = getattr(self.config, name) if wanted is None else wanted
        attentions = [layer.attention for layer in self.layers]
        rates = [attention.attention_dropout for attention in attentions if attention.training]
        wants |= {"dtype": self.dtype, "attention_dropout": max(rates, default=0.0)}
        return choose_layout(self.config, tokens, attention_mask, position_ids, kwargs.get("cu_seq_lens_q"), **wants)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        layout: RectangularLayout | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput | BaseModelOutputWithPooling:
        """Encode a batch.

        Args:
            input_ids: `(B, L)`.
            attention_mask: `(B, L)`, 0 for padding; `(B, L, L)` boolean or 0-1, row i says which keys query i may see;
                `(B, 1|H, L, L)` the same, or floats added to the scores. A token that no query may see is padding.
            token_type_ids: `(B, L)` segment numbers; not looked at when `type_vocab_size` is 0.
            position_ids: `(B, L)` or `(1, L)` counted from 0; by default they count the real tokens, so that the side
                of the padding does not matter. Where those of real tokens fall back to 0, a new packed sequence
                begins.
            inputs_embeds: `(B, L, W)` in place of input_ids, before scaling, positions and norm.
            layout: What `layout()` gave for the same inputs.
            kwargs: `output_attentions` (real weights under every attention implementation),
                `output_hidden_states`, `return_dict`, `cu_seq_lens_q` (edges of packed sequences over the rows laid
                end to end, from 0 to B * L, in place of position_ids that restart).

        Returns:
            `last_hidden_state` `(B, L, E)`, where rows of padding are 0, or, when `layout` is given, in the layout's
            own arrangement, `(T, E)` for a `FlatLayout`; with `add_pooling_layer` `pooler_output` `(B, E)`, of packed
            rows `(num_sequences, E)`; `hidden_states`, num_hidden_layers + 1 of them, and `attentions` `(B, H, L, L)`
            per layer where asked for.

        Raises:
            ValueError: Inputs that do not fit each other, the vocabulary, or a table of positions.
            TypeError: A mask that is no tensor, or floats in the three-axis form.
        """
        arranged = layout is not None
        if not arranged:
            layout = self.layout(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        layout.check_length(self.positions, given=position_ids is not None)
        check_indices("input_ids", input_ids, "vocab_size", self.config.vocab_size)
        if self.config.type_vocab_size:
            check_indices("token_type_ids", token_type_ids, "type_vocab_size", self.config.type_vocab_size)

        inputs = [layout.gather(tensor) for tensor in (input_ids, inputs_embeds, token_type_ids)]
        hidden_states = self.embeddings(*inputs, self.positions, layout.gather(layout.position_ids))
        masks = layout.prepare(self.positions, hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, layout, *masks[layer.attention.layer_type])
        hidden_states = self.final_norm(hidden_states)
        finished = layout.finish(hidden_states) if arranged else layout.restore(hidden_states)
        if self.pooler is None:
            return BaseModelOutput(last_hidden_state=finished)
        pooled = self.pooler(layout.finish(hidden_states), layout)
        return BaseModelOutputWithPooling(last_hidden_state=finished, pooler_output=pooled)


class DsxEncoderPredictionHead(nn.Module):
    """Hidden states to the space of the word embedding: map, activation, norm (BERT), or two maps (UltraBERT)."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__()
        self.is_mlp = config.prediction_head == "mlp"
        self.act_fn = ACT2FN[config.prediction_activation]
        if self.is_mlp:
            self.dense = nn.Linear(config.hidden_size, config.prediction_head_size, bias=False)
            self.out_proj = nn.Linear(config.prediction_head_size, config.embedding_size, bias=False)
        else:
            self.dense = nn.Linear(config.hidden_size, config.embedding_size, bias=config.classifier_bias)
            self.norm = build_norm(config, config.embedding_size)

    def forward(self, hidden_states):
        hidden_states = self.act_fn(self.dense(hidden_states))
        return self.act_fn(self.out_proj(hidden_states)) if self.is_mlp else self.norm(hidden_states)  # (..., W)


def token_transform(config: DsxEncoderConfig) -> nn.Module:
    """The transform of each token in front of a classifier of tokens, where the configuration asks for it."""
    return DsxEncoderTransform(config) if config.transform_tokens else nn.Identity()


def head_dropout(config: DsxEncoderConfig) -> DsxEncoderDropout:
    """Dropout in front of a classifier."""
    return DsxEncoderDropout(config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout)


class DsxEncoderForMaskedLM(DsxEncoderPreTrainedModel):
    """Predicts masked tokens (BERT, https://arxiv.org/abs/1810.04805); the decoder is the word embedding if tied."""

    _tied_weights_keys = {"decoder.weight": "model.embeddings.word_embeddings.weight"}

    def __init__(self, config: DsxEncoderConfig):
        super().__init__(config)
        self.model = DsxEncoderModel(config, add_pooling_layer=False)
        bare = config.prediction_head == "none"
        self.prediction_head = nn.Identity() if bare else DsxEncoderPredictionHead(config)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size, bias=config.decoder_bias)
        self.post_init()

    def get_output_embeddings(self):
        return self.decoder

    def set_output_embeddings(self, new_embeddings):
        self.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Inputs as in `DsxEncoderModel.forward`; `labels` `(B, L)` token numbers, -100 where nothing is asked.

        Returns:
            `loss` over the labelled real tokens and `logits` `(B, L, V)`, 0 on padding. While training with
            `sparse_prediction` and labels the vocabulary's logits are made for labelled tokens alone, some at a time,
            and not kept: `logits` is None.
        """
        outputs, layout = self.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        hidden_states = outputs.last_hidden_state
        labels = None if labels is None else token_labels(labels, layout)
        num_items, loss, logits = kwargs.get("num_items_in_batch"), None, None
        if labels is not None and self.training and self.config.sparse_prediction and not is_traced():
            labelled = labels != IGNORE_INDEX
            loss = self.sparse_loss(layout.select(hidden_states, labelled), labels[labelled], num_items)
        else:
            logits = self.decoder(self.prediction_head(hidden_states))
            if labels is not None:
                loss = cross_entropy_loss(logits, layout.gather(labels), num_items, size_name="vocab_size")
            logits = layout.restore(logits)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def sparse_loss(self, hidden_states, labels, num_items_in_batch=None):
        """Loss of labelled tokens `(num_labelled, E)`, whose logits are made in parts that fit a cache."""
        hidden_states = self.prediction_head(hidden_states)
        num_items = max(len(labels), 1) if num_items_in_batch is None else num_items_in_batch
        at_once = max(MAX_LOGITS // self.config.vocab_size, 1)
        parts = zip(hidden_states.split(at_once), labels.split(at_once), strict=True)
        return sum(
            cross_entropy_loss(self.decoder(tokens), of_tokens, num_items, size_name="vocab_size")
            for tokens, of_tokens in parts
        )


class DsxEncoderForSequenceClassification(DsxEncoderPreTrainedModel):
    """One label, several labels or numbers for a whole text (or a pair of texts)."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = DsxEncoderModel(config, add_pooling_layer=False)
        self.pooler = DsxEncoderPooler(config)
        self.dropout = head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Inputs as in `DsxEncoderModel.forward`; `labels` as in `sequence_loss`.

        Returns:
            `loss` and `logits` `(B, N)`; of packed rows `(num_sequences, N)`, in the order of the batch.
        """
        outputs, layout = self.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        logits = self.classifier(self.dropout(self.pooler(outputs.last_hidden_state, layout)))
        loss = None
        if labels is not None:
            loss = sequence_loss(self.config, logits, labels, kwargs.get("num_items_in_batch"))
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class DsxEncoderForTokenClassification(DsxEncoderPreTrainedModel):
    """A label for each token, as in named-entity recognition."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = DsxEncoderModel(config, add_pooling_layer=False)
        self.transform = token_transform(config)
        self.dropout = head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Inputs as in `DsxEncoderModel.forward`; `labels` `(B, L)` class numbers, -100 for tokens without one.

        Returns:
            `loss` over the labelled real tokens and `logits` `(B, L, N)`, 0 on padding.
        """
        outputs, layout = self.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        hidden_states = self.transform(outputs.last_hidden_state)
        logits = self.classifier(self.dropout(hidden_states))  # in the layout's arrangement
        loss = None
        if labels is not None:
            labels = layout.gather(token_labels(labels, layout))
            loss = cross_entropy_loss(logits, labels, kwargs.get("num_items_in_batch"))
        return TokenClassifierOutput(
            loss=loss,
            logits=layout.restore(logits),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class DsxEncoderForQuestionAnswering(DsxEncoderPreTrainedModel):
    """Start and end of the answer in a text, as in SQuAD."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__(config)
        self.model = DsxEncoderModel(config, add_pooling_layer=False)
        self.transform = token_transform(config)
        self.dropout = head_dropout(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Inputs as in `DsxEncoderModel.forward`; `start_positions` and `end_positions` `(B,)` are places in the row.

        Of packed rows there is one answer a sequence, `(num_sequences,)`, its places counted from the sequence's own
        start. An answer that was cut off, with start or end past the row or on its padding, is no item.

        Returns:
            `loss`, the mean of both cross entropies, and `start_logits` and `end_logits` `(B, L)`, of packed rows
            `(num_sequences, longest)`: the dtype's minimum on padding and past a sequence's end, so that those take no
            share of the softmax.
        """
        outputs, layout = self.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        logits = self.qa_outputs(self.dropout(self.transform(outputs.last_hidden_state)))  # (..., 2)
        real = torch.ones_like(logits[..., 0], dtype=torch.bool)
        logits = layout.by_sequence(logits, torch.finfo(logits.dtype).min)  # (B, L, 2)
        start_logits, end_logits = logits.unbind(dim=-1)  # (B, L) each
        loss = None
        if start_positions is not None and end_positions is not None:
            num_items, tokens = kwargs.get("num_items_in_batch"), layout.by_sequence(real, False)
            labels = answer_labels(start_positions, end_positions, logits.shape[1], tokens)
            loss = 0.5 * sum(
                cross_entropy_loss(logits_of, places, num_items)
                for logits_of, places in zip((start_logits, end_logits), labels, strict=True)
            )
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class DsxEncoderForMultipleChoice(DsxEncoderPreTrainedModel):
    """Which of several texts fits: each choice is encoded and scored alone."""

    def __init__(self, config: DsxEncoderConfig):
        super().__init__(config)
        self.model = DsxEncoderModel(config, add_pooling_layer=False)
        self.pooler = DsxEncoderPooler(config)
        self.dropout = head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        """Inputs as in `DsxEncoderModel.forward` with an axis of C choices after the batch, `(B, C, L)`.

        Packed choices: the rows of choice 0, choice 1, ... hold those of the same examples in the same order.

        Returns:
            `loss` against `labels` `(B,)`, numbers of the right choice, and `logits` `(B, C)`; of choices with n
            sequences a row `(B * n,)` and `(B * n, C)`, in the order of the examples.

        Raises:
            ValueError: Inputs without the axis of choices, or rows with different numbers of sequences.
        """
        choices = input_ids if inputs_embeds is None else inputs_embeds
        if choices is None or choices.ndim != (3 if inputs_embeds is None else 4):
            shape = None if choices is None else tuple(choices.shape)
            raise ValueError(
                f"Multiple choice takes input_ids (batch, choices, length) or inputs_embeds (batch, choices, length, "
                f"E), got {shape}; stack the choices of an example along the second axis."
            )
        num_choices = choices.shape[1]
        input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds = (
            None if tensor is None else tensor.flatten(0, 1)  # (B * C, L, ...)
            for tensor in (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        )
        outputs, layout = self.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        logits = self.classifier(self.dropout(self.pooler(outputs.last_hidden_state, layout)))  # (B * C * n, 1)
        counts = layout.sequences_per_row() if layout.packs else [1]
        if len(set(counts)) > 1:
            raise ValueError(
                f"The rows of the choices pack {counts} sequences, but all must pack the same number: row c of an "
                "example holds choice c of each text packed there; pad, or pack the same texts in every row."
            )
        logits = logits.view(-1, num_choices, counts[0]).transpose(1, 2).flatten(0, 1)  # (B * n, C)
        loss = None
        if labels is not None:
            check_label_shape(labels.flatten(), logits.shape[:1])
            loss = cross_entropy_loss(logits, labels, kwargs.get("num_items_in_batch"), size_name="choices")
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = [
    "DsxEncoderForMaskedLM",
    "DsxEncoderForMultipleChoice",
    "DsxEncoderForQuestionAnswering",
    "DsxEncoderForSequenceClassification",
    "DsxEncoderForTokenClassification",
    "DsxEncoderModel",
    "DsxEncoderPreTrainedModel",
]
