"""Calibration for attend.double_sparsity (arXiv 2408.07092): how heavy every channel of every KV head is.

The mean of |q k| over rows, both rotated, of the same row, summed over the query heads that share a KV head; over
stretches of library source, of which every one counts alike. Nothing is learned, so nothing is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from phasewise.engine.assembly import kv_shapes
from phasewise.known.corpus import sources
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.load import files_of, load_model
from phasewise.methods.attend.double_sparsity import DoubleSparsity
from phasewise.model.model import Model
from phasewise.model.tokenizer import beginning, begun
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.plan import AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.train.artefacts import ArtefactJob
from phasewise.verbs.attend import Attend

TOKENS, ROW = 131_072, 512


def train(method: DoubleSparsity, job: ArtefactJob) -> Path:
    """Measure `job.tokens` of text in stretches of 512."""
    model, tokens = load_model(job.model, dtype=torch.float32), job.tokens or TOKENS
    tensors = measure(model, stretches(job.model, max(1, tokens // ROW), job.seed))
    return job.save(model, method.artefact(model.config), tensors, tokens)


def stretches(model: str, count: int, seed: int) -> list[list[int]]:
    """Draws stretches of library source, from anywhere in it, in the model's own tokens. Each begins with what
    the model expects before every text (`begun`)."""
    texts, rng, found = list(sources(held_out=False).values()), Random(f"{seed} channels"), list[list[int]]()
    tokenizer = files_of(model).tokenizer()
    begin = beginning(tokenizer)
    while len(found) < count:
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - 8 * ROW))
        ids = tokenizer.encode(text[start : start + 8 * ROW], add_special_tokens=False).ids[:ROW]
        if len(ids) > 1:
            found.append(begun(ids, begin)[:ROW])
    return found


@torch.inference_mode()
def measure(model: Model, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The tensors of the artefact, over these token rows."""
    seen = _Seen()
    phase = Phase("calibration", decode=None, attend=seen)  # type: ignore[arg-type]  # nobody decodes
    counters = Counters()
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 40), counters=counters)
    for tokens in rows:
        request = Request(tokens, Params(max_tokens=1))
        kv = request.kv = store.open(request, len(tokens))
        kv.reserve(len(tokens))
        forward(model, [Span(request, kv, phase, tokens, range(len(tokens)))], counters)
        kv.commit(0)
        request.release()
    return {f"{layer}.weight": total / seen.rows[layer] for layer, total in seen.totals.items()}


class _Seen(Attend):
    """Dense attention that adds up |q k| of every channel, by layer: totals float32 [H, D] of so many rows."""

    def __init__(self) -> None:
        self.totals: dict[int, Tensor] = {}
        self.rows: dict[int, int] = {}

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(Custom(self.attend))

    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        for read in reads:
            k = read.part.keys(read.part.n, read.part.size[1])  # [H, R, D], of the rows themselves
            total = heaviness(read.q, k)
            self.totals[read.layer] = self.totals.get(read.layer, 0) + total
            self.rows[read.layer] = self.rows.get(read.layer, 0) + k.shape[1]
        return [None] * len(reads)


def heaviness(q: Tensor, k: Tensor) -> Tensor:
    """The sum over rows of |q k|, q [R, H * G, D], k [H, R, D] -> float32 [H, D]."""
    heads, rows, dim = k.shape
    weight = q.float().abs().view(rows, heads, -1, dim).sum(2)  # [R, H, D]
    return (weight * k.float().abs().transpose(0, 1)).sum(0)
