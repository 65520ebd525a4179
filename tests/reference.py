"""The encoder once more, in plain tensor algebra and double precision, written from the papers.

Every function takes tensors and numbers only; `encode()` reads a model's `state_dict` and its configuration and
computes the whole trunk row by row, with no batching tricks, so that it can stand against any back end.
Shapes: B batch, L sequence, E hidden_size, H heads, D head size, F intermediate_size.
"""

import math

import torch

ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "relu": lambda x: x.clamp(min=0.0),
    "silu": lambda x: x / (1.0 + torch.exp(-x)),
    "tanh": torch.tanh,
}


def softmax(scores):
    """Softmax over the last axis, safe for large scores."""
    exponentials = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def scaled_dot_product_attention(query, key, value, visible=None, bias=0.0):
    """Compute softmax(Q K^T / sqrt(D) + bias) V on (..., L, D); blind queries get 0. Returns (output, weights)."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
    if visible is None:
        weights = softmax(scores)
        return weights @ value, weights
    visible = visible.expand_as(scores)
    scores = torch.where(visible, scores, torch.full_like(scores, -math.inf))
    blind = ~visible.any(dim=-1, keepdim=True)
    weights = softmax(torch.where(blind, torch.zeros_like(scores), scores))
    weights = torch.where(blind, torch.zeros_like(weights), weights)
    return weights @ value, weights


def layer_norm(x, weight, bias=None, eps=1e-5):
    """(x - mean) / sqrt(biased variance + eps) * weight + bias."""
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred**2).mean(dim=-1, keepdim=True)
    normed = centred / torch.sqrt(variance + eps) * weight
    return normed if bias is None else normed + bias


def rms_norm(x, weight, eps=1e-5):
    """Divide by the root mean square: x / sqrt(mean of squares + eps) * weight."""
    return x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + eps) * weight


def linear(x, state, name):
    """Compute x W^T (+ b), the weights looked up by the module's name."""
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def gated_feed_forward(x, state, name, act):
    """Compute down(act(gate(x)) * up(x))."""
    return linear(
        act(linear(x, state, f"{name}.gate_proj")) * linear(x, state, f"{name}.up_proj"), state, f"{name}.down_proj"
    )


def classic_feed_forward(x, state, name, act):
    """Compute act(x W1 + b1) W2 + b2."""
    return linear(act(linear(x, state, f"{name}.up_proj")), state, f"{name}.down_proj")


def sinusoid(num_positions, width):
    """PE[p, 2i] = sin(p / 10000^(2i/E)), PE[p, 2i+1] = cos(same); an odd width drops the last cosine."""
    table = torch.zeros(num_positions, width, dtype=torch.float64)
    for position in range(num_positions):
        for column in range(width):
            angle = position / 10000.0 ** ((column - column % 2) / width)
            table[position, column] = math.sin(angle) if column % 2 == 0 else math.cos(angle)
    return table


def rotate(x, positions, base=10000.0):
    """Rotary embedding on (..., L, D): component i turns with component i + D/2 by position / base^(2i/D)."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([base ** (-2.0 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    angle = positions.to(torch.float64)[:, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def t5_bucket(distance, num_buckets=32, max_distance=128):
    """T5's bidirectional bucket of `key position - query position` (one integer)."""
    half = num_buckets // 2
    bucket = half if distance > 0 else 0
    distance = abs(distance)
    exact = half // 2
    if distance < exact:
        return bucket + distance
    steps = half - exact  # floor(steps * log(distance / exact) / log(max_distance / exact)) in whole numbers
    far = max(k for k in range(steps) if distance**steps * exact**k >= max_distance**k * exact**steps)
    return bucket + exact + far


def alibi_slopes(num_heads):
    """Press et al.: 2^(-8/n), 2^(-16/n), ... for n a power of two, else filled from every second slope of 2n."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-8.0 * (i + 1) / (2 * power)) for i in range(2 * power)][0::2]
    return torch.tensor((slopes + extra)[:num_heads], dtype=torch.float64)


def score_bias(config, state, positions):
    """What the position scheme adds to the scores: (H, L, L), zeros for most schemes."""
    distance = positions[None, :] - positions[:, None]  # key - query
    bias = torch.zeros(config.num_attention_heads, *distance.shape, dtype=torch.float64)
    if config.position_embedding_type == "alibi":
        return bias - alibi_slopes(config.num_attention_heads)[:, None, None] * distance.abs()
    if config.position_embedding_type in ("relative_bias", "learned_relative_bias"):
        table = state["positions.relative_attention_bias.weight"]
        sizes = (config.relative_attention_num_buckets, config.relative_attention_max_distance)
        for i, row in enumerate(distance.tolist()):
            for j, value in enumerate(row):
                bias[:, i, j] = table[t5_bucket(value, *sizes)]
    return bias


def attention(x, config, state, layer, positions, visible, additive):
    """One attention sub-layer on one row (L, E) with fused and possibly grouped projections."""
    name, num_heads = f"layers.{layer}.attention", config.num_attention_heads
    num_groups = config.num_key_value_heads or num_heads
    size = config.hidden_size // num_heads
    fused = linear(x, state, f"{name}.qkv_proj").view(x.shape[0], num_heads + 2 * num_groups, size).transpose(0, 1)
    query, key, value = fused.split([num_heads, num_groups, num_groups])
    if config.position_embedding_type == "rope":
        kind = config.layer_types[layer]
        base = config.rope_parameters.get(kind, config.rope_parameters)["rope_theta"]
        query, key = rotate(query, positions, base), rotate(key, positions, base)
    key = key.repeat_interleave(num_heads // num_groups, dim=0)
    value = value.repeat_interleave(num_heads // num_groups, dim=0)
    bias = score_bias(config, state, positions) + additive
    if config.layer_types[layer] == "sliding_attention":
        near = (positions[None] - positions[:, None]).abs() <= config.sliding_window
        is_global = positions < config.num_global_tokens
        visible = visible & (near | is_global[None] | is_global[:, None])
    mixed, _ = scaled_dot_product_attention(query, key, value, visible, bias)
    return linear(mixed.transpose(0, 1).reshape(x.shape[0], -1), state, f"{name}.out_proj")


def normalise(x, config, state, name):
    """The configured norm under the module's name."""
    weight = state[f"{name}.weight"]
    if config.norm_type == "rms_norm":
        return rms_norm(x, weight, config.norm_eps)
    return layer_norm(x, weight, state.get(f"{name}.bias"), config.norm_eps)


def layer(x, config, state, index, positions, visible, additive):
    """One whole layer: Pre-LN x + sub(norm(x)), or Post-LN norm(x + sub(x)), around both sub-layers."""
    feed_forward = gated_feed_forward if config.gated_mlp else classic_feed_forward
    act = ACTIVATIONS[config.hidden_act]
    subs = {
        "attention_norm": lambda y: attention(y, config, state, index, positions, visible, additive),
        "mlp_norm": lambda y: feed_forward(y, state, f"layers.{index}.mlp", act),
    }
    for norm, sub in subs.items():
        name = f"layers.{index}.{norm}"
        if name == "layers.0.attention_norm" and not config.first_attention_norm:
            x = x + sub(x)
        elif config.norm_position == "pre":
            x = x + sub(normalise(x, config, state, name))
        else:
            x = normalise(x + sub(x), config, state, name)
    return x


def encode_row(ids, config, state, visible, additive=0.0, types=None):
    """The trunk on one row of ids (L,); `visible` is (H or 1, L, L); tokens no query may see are dropped first."""
    real = visible.any(dim=0).any(dim=0)
    keep = real.nonzero().flatten()
    visible = visible[:, keep][:, :, keep]
    additive = additive[:, keep][:, :, keep] if torch.is_tensor(additive) else additive
    positions = torch.arange(len(keep))
    x = state["embeddings.word_embeddings.weight"][ids[keep]]
    scheme = config.position_embedding_type
    scaled = config.scale_embeddings if config.scale_embeddings is not None else scheme == "sinusoidal"
    x = x * math.sqrt(config.embedding_size) if scaled else x
    if config.type_vocab_size:
        kinds = torch.zeros_like(keep) if types is None else types[keep]
        x = x + state["embeddings.token_type_embeddings.weight"][kinds]
    if scheme == "sinusoidal":
        x = x + sinusoid(len(keep) + config.position_offset, config.embedding_size)[config.position_offset :]
    if scheme in ("learned", "learned_relative_bias"):
        x = x + state["positions.table.weight"][positions + config.position_offset]
    x = normalise(x, config, state, "embeddings.norm") if config.embedding_norm else x
    if config.embedding_size != config.hidden_size:
        x = linear(x, state, "embeddings.projection")
    for index in range(config.num_hidden_layers):
        x = layer(x, config, state, index, positions, visible, additive)
    x = normalise(x, config, state, "final_norm") if config.norm_position == "pre" else x
    full = torch.zeros(len(ids), config.hidden_size, dtype=torch.float64)
    full[keep] = x
    return full


def encode(model, input_ids, mask=None, types=None):
    """`last_hidden_state` of a trunk in double precision for a 2-D, 3-D or 4-D mask (boolean, 0-1 or additive)."""
    state = {key: value.double() for key, value in model.state_dict().items()}
    rows = []
    for row, ids in enumerate(input_ids):
        visible, additive = torch.ones(1, len(ids), len(ids), dtype=torch.bool), 0.0
        if mask is not None and mask.dim() == 4 and mask.is_floating_point():
            lowest = torch.finfo(mask.dtype).min
            visible = mask[row] > lowest / 2
            additive = torch.where(visible, mask[row].double(), 0.0)
        elif mask is not None:
            visible = mask[row].bool().expand(1, len(ids), len(ids)) if mask.dim() < 4 else mask[row].bool()
        rows.append(encode_row(ids, model.config, state, visible, additive, None if types is None else types[row]))
    return torch.stack(rows)
