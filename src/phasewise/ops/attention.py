"""Attention of one span's rows over one part of its KV, with its plain twin; native.spans does many spans at once.

Shapes: q [R, Hq, D]; k, v [H, N, D] with Hq = H * G; mask bool [1 | H, R, N] (True = visible) or None = all visible.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phasewise.ops.native import prefill
from phasewise.ops.native.spans import SeenWindow


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """softmax(scale * q k^T) v -> [R, Hq, D]. Rows that see nothing are not allowed.

    Rows under a mask are read by the native kernel, where there is one, which passes over blocks that none of them see.
    """
    if mask is not None and q.shape[0] > 1 and not (q.requires_grad or k.requires_grad) and prefill.fits(q, k, v):
        return prefill.masked(q, k, v, mask, scale if softcap is None else (scale, softcap))
    return attention_plain(q, k, v, mask, scale, softcap)


def attention_plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """`attention` in torch's operators, the kernel's twin."""
    if softcap is not None:
        return reference(q, k, v, mask, scale, softcap)[0]
    rows, heads_q, dim = q.shape
    heads = k.shape[0]
    group = heads_q // heads
    if rows == 1:
        grouped = q.reshape(1, heads, group, dim)
        wide = None if mask is None else mask.reshape(1, -1, 1, k.shape[1])
        return F.scaled_dot_product_attention(grouped, k[None], v[None], wide, scale=scale).reshape(1, heads_q, dim)
    if group > 1:
        k = k.repeat_interleave(group, 0)
        v = v.repeat_interleave(group, 0)
        if mask is not None and mask.shape[0] > 1:
            mask = mask.repeat_interleave(group, 0)
    wide = None if mask is None else mask[None]
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], wide, scale=scale)
    return out[0].transpose(0, 1)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, block: int = 1) -> Tensor:
    """Attention of the last R of N rows, row i seeing 0 .. N-R+i and the rest of its block of so many of the R, without
    building a mask. -> [R, Hq, D]."""
    if prefill.fits(q, k, v):
        return prefill.causal(q, k, v, scale, seen=SeenWindow(0, block=block))
    return causal_plain(q, k, v, scale, block)


ROWS = 64  # query rows per block of `causal_plain`: its scores stay in the cache, and most of the future is skipped


def causal_plain(q: Tensor, k: Tensor, v: Tensor, scale: float, block: int = 1) -> Tensor:
    """`causal` in torch's operators, the kernel's twin. -> [R, Hq, D].

    Scores and softmax in float32, weights rounded to v's dtype, as fused kernels do; two large products per block are
    1.2 to 1.7 times as fast on a CPU as torch's fused call.
    """
    rows, heads_q, dim = q.shape
    heads, n, _ = k.shape
    group = heads_q // heads
    out = q.new_empty(rows, heads_q, dim)
    keys = k.float().transpose(1, 2)  # [H, D, N]
    scaled = (q.float() * scale).view(rows, heads, group, dim).permute(1, 2, 0, 3)  # [H, G, R, D]
    every = torch.arange(rows, device=q.device)
    ends = ((every // block + 1) * block).clamp_max(rows)  # of the own rows each sees
    for start in range(0, rows, ROWS):
        end = min(start + ROWS, rows)
        width, own = end - start, min(-(-end // block) * block, rows)
        seen = n - rows + own
        logits = torch.bmm(scaled[:, :, start:end].reshape(heads, group * width, dim), keys[:, :, :seen])
        future = every[start:own] >= ends[start:end, None]
        logits.view(heads, group, width, seen)[..., n - rows + start :].masked_fill_(future, float("-inf"))
        read = torch.bmm(logits.softmax(-1).to(v.dtype), v[:, :seen])  # [H, G * width, D]
        out[start:end] = read.view(heads, group, width, dim).permute(2, 0, 1, 3).reshape(width, heads_q, dim)
    return out


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The plain twin, with the log-sum-exp: -> out [R, Hq, D], lse float32 [R, Hq]. Rows blind to all give 0, -inf."""
    return weigh(scores(q, k, scale, softcap), v, mask)


def unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """`reference` of rows that all see everything, as one matrix product per KV head; both results float32."""
    rows, heads_q, dim = q.shape
    heads = k.shape[0]
    by_head = q.view(rows, heads, -1, dim).transpose(1, 2).reshape(-1, heads, dim)  # [R * G, H, D]
    out, lse = reference(by_head, k, v.float(), None, scale, softcap)
    out = out.view(rows, -1, heads, dim).transpose(1, 2).reshape(rows, heads_q, dim)
    return out, lse.view(rows, -1, heads).transpose(1, 2).reshape(rows, heads_q)


def weigh(logits: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of logits [H, G, R, N] over what is visible, applied to v. -> out [R, Hq, D], lse float32 [R, Hq]."""
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
    lse = logits.logsumexp(-1)  # [H, G, R]
    weights = (logits - lse[..., None].clamp(min=torch.finfo(torch.float32).min)).exp()
    out = weights @ v.float()[:, None]  # [H, G, R, D]
    heads, group, rows, dim = out.shape
    joined = out.permute(2, 0, 1, 3).reshape(rows, heads * group, dim).to(v.dtype)
    return joined, lse.permute(2, 0, 1).reshape(rows, heads * group)


def sink(out: Tensor, lse: Tensor, scores: Tensor) -> Tensor:
    """Attention [R, Hq, D] with the log-sum-exp of its scores [R, Hq], where heads have one more score each, float32
    [Hq], for which there is no value: gpt-oss's sinks."""
    return (out * torch.sigmoid(lse - scores)[..., None]).to(out.dtype)


def scores(q: Tensor, k: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Unmasked float32 attention logits [H, G, R, N]."""
    rows, heads_q, dim = q.shape
    grouped = q.float().reshape(rows, k.shape[0], heads_q // k.shape[0], dim).permute(1, 2, 0, 3)  # [H, G, R, D]
    logits: Tensor = grouped @ k.float()[:, None].transpose(-1, -2) * scale
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Join attention over disjoint sets of rows: [(out [R, Hq, D], lse [R, Hq])] -> out [R, Hq, D]."""
    lse = torch.stack([p[1] for p in parts])  # [P, R, Hq]
    weights = torch.softmax(lse, 0)[..., None]
    out: Tensor = (weights * torch.stack([p[0].float() for p in parts])).sum(0)
    return out.to(parts[0][0].dtype)
