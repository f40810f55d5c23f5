"""The rules of sampling once more, one row at a time in float64 numpy: slow and obvious."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phasewise.request.params import Params

Row = np.ndarray


def penalised(logits: Row, prompt: Sequence[int], out: Sequence[int], params: Params) -> Row:
    """Repetition over prompt and output, then presence and frequency over the output, then bias."""
    row = np.array(logits, dtype=np.float64)
    for token in {*prompt, *out}:
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in range(len(row)):
        count = list(out).count(token)
        row[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        row[token] += bias
    return row


def softmax(row: Row) -> Row:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def filtered(probs: Row, params: Params) -> Row:
    """Top-k, top-p, min-p, each on what the one before has left; renormalised."""
    kept = np.array(probs)
    if params.top_k:
        kept[kept < sorted(kept)[-min(params.top_k, len(kept))]] = 0.0
        kept /= kept.sum()
    if params.top_p < 1.0:
        total, nucleus = 0.0, []
        for token in np.argsort(-kept, kind="stable"):
            if total >= params.top_p:
                break
            nucleus.append(token)
            total += kept[token]
        kept[[token for token in range(len(kept)) if token not in nucleus]] = 0.0
    kept[kept < params.min_p * kept.max()] = 0.0
    return kept / kept.sum()


def distribution(logits: Row, prompt: Sequence[int], out: Sequence[int], params: Params) -> Row:
    """Probabilities of the next token after `prompt` and `out`."""
    row = penalised(logits, prompt, out, params)
    if params.greedy:
        return np.eye(len(row))[int(row.argmax())]
    return filtered(softmax(row / params.temperature), params)
