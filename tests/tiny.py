"""The tiny encoder that the tests run on: 2 layers, 32 wide, 4 heads, 99 tokens, no dropout.

- `HEADS` and `POSITIONS` list what every behaviour is tried over; `config_grid()` crosses the latter with windows.
- `build()` gives every parameter (biases and norms too) a value that matters, so that a forgotten term shows.
- `token_batch()` pads rows left, right or with holes; `labels_for()` makes the labels each head wants.
"""

import torch

from modeling_dsx_encoder import (
    DsxEncoderConfig,
    DsxEncoderForMaskedLM,
    DsxEncoderForMultipleChoice,
    DsxEncoderForQuestionAnswering,
    DsxEncoderForSequenceClassification,
    DsxEncoderForTokenClassification,
    DsxEncoderModel,
)

HEADS = {
    "masked_lm": DsxEncoderForMaskedLM,
    "sequence": DsxEncoderForSequenceClassification,
    "token": DsxEncoderForTokenClassification,
    "question": DsxEncoderForQuestionAnswering,
    "choice": DsxEncoderForMultipleChoice,
}
TRUNK_AND_HEADS = {"trunk": DsxEncoderModel, **HEADS}
POSITIONS = ("sinusoidal", "learned", "rope", "relative_bias", "learned_relative_bias", "alibi", "none")
WINDOWS = {
    "full": {},
    "sliding": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 2},
    "global": {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 1, "num_global_tokens": 1},
}
NO_DROPOUT = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0, "mlp_dropout": 0.0}
LENGTHS = (9, 4, 7)
SIDES = ("left", "right", "holes")


def tiny_config(**overrides):
    """A valid configuration of the smallest useful size; any field may be overridden."""
    fields = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "num_labels": 3,
        **NO_DROPOUT,
    }
    return DsxEncoderConfig(**{**fields, **overrides})


def config_grid(**overrides):
    """Every position scheme, with full layers and with a mix of full and sliding layers."""
    for scheme in POSITIONS:
        for window in ("full", "sliding"):
            yield f"{scheme}-{window}", tiny_config(position_embedding_type=scheme, **WINDOWS[window], **overrides)


def build(model_class, config, attention="sdpa", seed=0):
    """Build in eval mode and give each parameter a value far from its start (biases, norm scales, pad row too)."""
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation=attention)
    scramble(model, seed)
    return model.eval()


@torch.no_grad()
def scramble(model, seed=0):
    """Overwrite all parameters: matrices with variance about 1/fan-in, scales about 1, biases about 0."""
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            is_scale = name.endswith("weight")
            parameter.copy_((1.0 if is_scale else 0.0) + 0.3 * noise)
        elif "embeddings" in name or "table" in name or "relative_attention_bias" in name:
            parameter.copy_(0.7 * noise)
        else:
            parameter.copy_(noise * parameter.shape[1] ** -0.5)


def token_batch(side="right", lengths=LENGTHS, seed=3, vocab_size=99):
    """Return `input_ids` and a 0-1 `attention_mask`; "holes" takes tokens out of the middle of the rows."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    rows = [torch.randint(5, vocab_size, (length,), generator=generator) for length in lengths]
    input_ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        if side == "left":
            where = torch.arange(width - len(tokens), width)
        elif side == "right":
            where = torch.arange(len(tokens))
        else:
            where = torch.randperm(width, generator=generator)[: len(tokens)].sort().values
        input_ids[row, where] = tokens
        mask[row, where] = 1
    return input_ids, mask


def for_head(name, input_ids, mask=None, **more):
    """Arrange a batch as the head takes it: multiple choice gets each row and its reverse as two choices."""
    inputs = {"input_ids": input_ids, **({} if mask is None else {"attention_mask": mask})}
    inputs.update(more)
    if name != "choice":
        return inputs
    return {key: torch.stack([value, value.roll(1, 0)], dim=1) for key, value in inputs.items()}


def labels_for(name, input_ids, mask=None, num_labels=3, seed=5):
    """Labels of the right shape: -100 on padding for token heads, a different number a row for masked LM."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = input_ids.shape
    if name == "sequence":
        return {"labels": torch.randint(0, num_labels, (num_rows,), generator=generator)}
    if name == "choice":
        return {"labels": torch.randint(0, 2, (num_rows,), generator=generator)}
    visible = torch.ones_like(input_ids) if mask is None else mask
    if name == "question":
        first = visible.argmax(dim=1)
        return {"start_positions": first, "end_positions": width - 1 - visible.flip(1).argmax(dim=1)}
    high = num_labels if name == "token" else 99
    labels = torch.randint(0, high, (num_rows, width), generator=generator)
    keep = torch.arange(width)[None] <= torch.arange(num_rows)[:, None] + 1  # uneven: row r keeps at most r + 2
    return {"labels": labels.masked_fill(~(keep & visible.bool()), -100)}


def gradients(model):
    """All gradients by name, zeros where none arrived."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
