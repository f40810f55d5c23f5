"""Heads and factor for attend.zero_tuning (arXiv 2505.11739, section on head profiles): chosen on a validation part.

Fresh draws of the training mixture, of another seed than the training's; held-out source and evaluation examples, which
are what is reported, are never looked at. Nothing is trained: every head is tried alone with a factor above 1, which
splits the heads into those it helps and those it hurts; then factors are tried on either class, and on all heads.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger, Raw
from phasewise.kv.store import Store
from phasewise.methods.attend.dense import Dense
from phasewise.methods.attend.zero_tuning import Tuned, ZeroTuning
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.train.artefacts import Job
from phasewise.train.mixture import Mixture, Stage

TOKENS = 8192  # of the validation part
TRIED = 2.0  # the factor with which heads are told apart
GAMMAS = (0.25, 0.5, 0.7, 1.4, 2.0, 4.0)
PARTS = Stage(1.0, 768, TOKENS, code=0.35, long=0.3, copies=0.2)
AT_ONCE = 4096  # rows of a forward


@dataclass(frozen=True)
class Example:
    """Tokens, and those of them that are to be predicted."""

    tokens: list[int]
    learned: list[bool]


@dataclass(frozen=True)
class Trial:
    """What was tried, and the mean loss of the validation part with it, nats per predicted token."""

    name: str
    gamma: float
    lift: Tensor  # [layers, Hq]
    loss: float


Loss = Callable[[Tensor], float]


def train(method: ZeroTuning, job: Job) -> Path:
    """Choose for one model; `job.out` gets trials.csv and the artefact. A run is minutes, so none is resumed."""
    model, _ = job.base()
    tokens = job.tokens or TOKENS
    part = validation(job.mixture(), tokens, job.seed)
    made = method.artefact(model.config)

    def loss(lift: Tensor) -> float:
        return mean_loss(model, part, Tuned(lift))

    trials = search(loss, (model.config.layers, model.config.heads))
    job.out.mkdir(parents=True, exist_ok=True)
    with (job.out / "trials.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("heads", "gamma", "loss"))
        rows.writerows((trial.name, trial.gamma, f"{trial.loss:.6f}") for trial in trials)
    best = min(trials, key=lambda trial: trial.loss)
    return job.save(model, made, {"lift": best.lift}, tokens)


def validation(mixture: Mixture, tokens: int, seed: int) -> list[Example]:
    """Conversations of the tasks, long and short, and windows of library source."""
    rng, found, left = Random(f"{seed} zero tuning"), list[Example](), tokens
    shares = {"code": PARTS.code, "long": PARTS.long, "short": 1 - PARTS.code - PARTS.long}
    while left > 0:
        kind = rng.choices(list(shares), list(shares.values()))[0]
        if kind == "code":
            ids = mixture.source(rng, PARTS.row // 3, 1).ids[0].tolist()
            one = Example(ids, [True] * len(ids))
        else:
            pieces = mixture.long_row(rng, PARTS.row) if kind == "long" else mixture.short_row(rng, PARTS)
            one = Example([token for ids, _ in pieces for token in ids], [learn for ids, learn in pieces for _ in ids])
        if len(one.tokens) <= 2 * PARTS.row and any(one.learned[1:]):
            found.append(one)
            left -= len(one.tokens)
    return found


def search(loss: Loss, shape: tuple[int, int]) -> list[Trial]:
    """Everything that was tried, dense attention first."""
    none = torch.zeros(shape)
    trials = [Trial("none", 1.0, none, loss(none))]
    dense = trials[0].loss
    helped = torch.zeros(shape, dtype=torch.bool)
    for layer in range(shape[0]):
        for head in range(shape[1]):
            one = torch.zeros(shape, dtype=torch.bool)
            one[layer, head] = True
            trial = _tried(loss, f"layer {layer} head {head}", one, TRIED)
            helped[layer, head] = trial.loss < dense
            trials.append(trial)
    classes = {"up": helped, "down": ~helped, "all": torch.ones(shape, dtype=torch.bool)}
    for name, heads in classes.items():
        trials += [_tried(loss, name, heads, gamma) for gamma in GAMMAS if bool(heads.any())]
    return trials


def _tried(loss: Loss, name: str, heads: Tensor, gamma: float) -> Trial:
    lift = torch.where(heads, torch.tensor(gamma).log(), torch.zeros(()))
    return Trial(name, gamma, lift, loss(lift))


@torch.inference_mode()
def mean_loss(model: Model, examples: Sequence[Example], attend: Any) -> float:
    """Nats per token to be predicted, each given the true tokens before it."""
    total, count = 0.0, 0
    for group in _groups(examples):
        for logits, one in zip(logits_of(model, [each.tokens for each in group], attend), group, strict=True):
            wanted = torch.tensor(one.learned[1:])
            scores = logits[:-1][wanted].float().log_softmax(-1)
            total -= float(scores.gather(1, torch.tensor(one.tokens[1:])[wanted][:, None]).sum())
            count += int(wanted.sum())
    return total / count


def _groups(examples: Sequence[Example]) -> Iterator[list[Example]]:
    group, rows = list[Example](), 0
    for one in examples:
        if group and rows + len(one.tokens) > AT_ONCE:
            yield group
            group, rows = [], 0
        group.append(one)
        rows += len(one.tokens)
    yield group


@torch.inference_mode()
def logits_of(model: Model, texts: Sequence[list[int]], attend: Any = None) -> Iterator[Tensor]:
    """Logits [tokens, V] of whole texts, all in one pass with this attend runtime (None: dense)."""
    phase = Phase("whole", decode=None, attend=attend or Dense())  # type: ignore[arg-type]
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 40), counters=Counters())
    spans = []
    for tokens in texts:
        request = Request(tokens)
        request.kv = store.open(request, len(tokens))
        spans.append(Span(request, request.kv, phase, tokens, range(len(tokens))))
    try:
        hidden = forward(model, spans, Counters())
        for span in spans:
            yield model.head(hidden.x[span.slice])
    finally:
        for span in spans:
            span.kv.close()
