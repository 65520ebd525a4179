"""What variable-length attention kernels promise, in plain steps on any device: the yardstick where there is no GPU.

`varlen_attn` has the face of torch's kernel, `flash_attn_varlen_func` that of the flash-attn package. Both refuse what
the real ones refuse and count their calls in `CALLS`.
"""

import itertools

import torch

CALLS = []


def attend(query, key, value, edges, longest, scale, window):
    """One sequence after the other: softmax(Q K^T scale) V over keys at most `window` places away, -1 for all."""
    for tensor in (query, key, value):
        assert tensor.dtype == query.dtype
        assert tensor.stride(-1) == 1
    assert edges.dtype == torch.int32
    assert edges.is_contiguous()
    ends = edges.tolist()
    assert (ends[0], ends[-1]) == (0, len(query))
    assert longest == max(end - begin for begin, end in itertools.pairwise(ends))
    assert isinstance(longest, int)
    outputs = []
    for begin, end in itertools.pairwise(ends):
        group = query.shape[1] // key.shape[1]
        q, k, v = (tensor[begin:end].transpose(0, 1) for tensor in (query, key, value))  # (heads, l, D)
        scores = q.float() @ k.float().repeat_interleave(group, 0).transpose(1, 2) * scale  # (H, l, l)
        place = torch.arange(end - begin, device=query.device)
        distance = place[None] - place[:, None]  # key minus query
        left, right = window
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden |= (distance < -left) if left >= 0 else False
        hidden |= (distance > right) if right >= 0 else False
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append((weights @ v.float().repeat_interleave(group, 0)).transpose(0, 1))  # (l, H, D)
    return torch.cat(outputs).to(query.dtype)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert cu_seq_q is cu_seq_k
    assert max_q == max_k
    assert enable_gqa or query.shape[1] == key.shape[1]
    CALLS.append({"window": window_size, "dtype": query.dtype})
    return attend(query, key, value, cu_seq_q, max_q, scale, window_size)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    assert cu_seqlens_q is cu_seqlens_k
    assert max_seqlen_q == max_seqlen_k
    assert not causal
    CALLS.append({"window": window_size, "dtype": q.dtype, "dropout": dropout_p})
    return attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size)
