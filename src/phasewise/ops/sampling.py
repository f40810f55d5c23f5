"""Logit rules over many rows at once. All take and return float32 [n, V]; per-row parameters are [n] tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from phasewise.errors import NotFinite

BYTES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf)
ADDED = BYTES.astype(np.float32)  # to the logits of eight tokens, by the bits of a mask


def largest(logits: Tensor) -> list[int]:
    """The id of the largest of each row, of equal ones the first. Raises NotFinite where it is NaN or infinity."""
    if logits.device.type == "cpu":  # numpy's search takes a sixth of the time of torch's
        rows = logits.numpy()
        tops = rows.argmax(-1)  # of NaN, if there is one
        if not (rows[np.arange(len(tops)), tops] < np.inf).all():
            raise NotFinite("logits are not finite")
        return list(tops.tolist())
    return list(logits.argmax(-1).tolist())


def barred(mask: Tensor, vocab: int) -> Tensor:
    """The number that a mask adds to each logit, float32 [vocab]: 0, or -inf where bit i of word j, int32 [vocab / 32],
    is not set: token 32 j + i."""
    return torch.from_numpy(ADDED[mask.numpy().view(np.uint8)].reshape(-1)[:vocab])


def allowed(logits: Tensor, masks: Sequence[Tensor | None]) -> list[int]:
    """The id of the largest of each row (overwritten) that its mask, if any, allows; -1 where none is above -inf."""
    for row, mask in zip(logits, masks):
        if mask is not None:
            row += barred(mask, len(row)).to(row.device)
    tops = largest(logits)
    for i, mask in enumerate(masks):
        if mask is not None and float(logits[i, tops[i]]) == float("-inf"):
            tops[i] = -1
    return tops


def penalise(logits: Tensor, seen: Tensor, counts: Tensor, rules: Tensor) -> Tensor:
    """-> [n, V]. `rules` [n, 3]: repetition (of tokens `seen` in prompt or output, bool [n, V]: divide positive
    logits, multiply negative ones), presence and frequency (subtract, by `counts` [n, V] in the output)."""
    repetition, presence, frequency = rules[:, :, None].unbind(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen, repeated, logits) - (presence * (counts > 0) + frequency * counts)


def shape(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Temperature, then top-k, top-p and min-p on the tempered probabilities, renormalised. -> probabilities [n, V].

    top_k 0, top_p 1 and min_p 0 switch a rule off for a row. Of equal logits at the top-k border all are kept.
    """
    best = logits.amax(-1, keepdim=True)  # taken off first: no temperature overflows
    if not bool(torch.isfinite(best).all()):
        raise NotFinite("logits are not finite")
    logits = (logits - best) / temperature.clamp(min=1e-30)[:, None]
    k_rows = top_k > 0
    if bool(k_rows.any()):
        largest = int(top_k.clamp(max=logits.shape[-1]).max())
        values = logits.topk(largest, -1).values
        border = values.gather(1, (top_k.clamp(1, largest) - 1)[:, None])
        logits = logits.masked_fill((logits < border) & k_rows[:, None], float("-inf"))
    probs = logits.softmax(-1)
    if bool((top_p < 1.0).any()):
        ordered, index = probs.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of the more likely tokens
        drop = torch.zeros_like(probs, dtype=torch.bool).scatter(1, index, before >= top_p[:, None])
        probs = probs.masked_fill(drop & (top_p < 1.0)[:, None], 0.0)
    if bool((min_p > 0.0).any()):
        probs = probs.masked_fill(probs < min_p[:, None] * probs.amax(-1, keepdim=True), 0.0)
    return probs / probs.sum(-1, keepdim=True)
