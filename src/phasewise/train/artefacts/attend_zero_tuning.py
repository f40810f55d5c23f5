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
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.methods.attend.dense import Dense
from phasewise.methods.attend.zero_tuning import Tuned, ZeroTuning
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.log import Log
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.trainer import bar

KEPT = "trials.csv"
TOKENS = 8192  # of the validation part
TRIED = 2.0  # the factor with which heads are told apart
GAMMAS = (0.25, 0.5, 0.7, 1.4, 2.0, 4.0)
PARTS = Stage(1.0, 768, TOKENS, code=0.35, long=0.3, copies=0.2)
AT_ONCE = 4096  # rows of a forward
ROUNDING = 1e-4  # nats between two machines, at most


@dataclass(frozen=True)
class TuningExample:
    """Tokens, and those of them that are to be predicted."""

    tokens: list[int]
    learned: list[bool]


@dataclass(frozen=True)
class TuningTrial:
    """A setting that was tried, and the mean loss of the validation part with it, nats per predicted token."""

    name: str
    gamma: float
    lift: Tensor  # [layers, Hq]
    loss: float


Loss = Callable[[Tensor], float]


def train(method: ZeroTuning, job: ArtefactJob) -> Path:
    """Choose for one model; `job.out` gets trials.csv, which a run that goes on starts from, and the artefact."""
    model, _ = job.base()
    tokens, shape = job.tokens or TOKENS, (model.config.layers, model.config.heads)
    part, path = validation(job.mixture(), tokens, job.seed), job.out / KEPT
    made = method.artefact(model.config)
    job.out.mkdir(parents=True, exist_ok=True)
    before = known(path) if job.resume else []

    def loss(lift: Tensor) -> float:
        return mean_loss(model, part, Tuned(lift))

    if before and abs(before[0] - (own := loss(torch.zeros(shape)))) > ROUNDING:
        raise UserError(
            f"{path} is of another run: without a factor the loss is {before[0]} there and {own} here; leave out "
            "--resume, choose another --out, or repeat --tokens and --seed as they were"
        )
    trials = list[TuningTrial]()
    with Log(path, len(before)) as log, bar() as shown:
        task = shown.add_task("trials", total=1 + shape[0] * shape[1] + 3 * len(GAMMAS), note="")
        for trial in search(remembering(before, loss), shape):
            trials.append(trial)
            if len(trials) > len(before):
                log.row({"step": len(trials), "heads": trial.name, "gamma": trial.gamma, "loss": repr(trial.loss)})
            shown.update(task, completed=len(trials), note=f"{trial.name} {trial.loss:.4f}")
    best = min(trials, key=lambda trial: trial.loss)
    return job.save(model, made, {"lift": best.lift}, tokens)


def known(path: Path) -> list[float]:
    """The losses that a run wrote, in order."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def remembering(before: Sequence[float], loss: Loss) -> Loss:
    """`loss`, but for the first calls, whose answers are known."""
    left = list(before)
    return lambda lift: left.pop(0) if left else loss(lift)


def validation(mixture: Mixture, tokens: int, seed: int) -> list[TuningExample]:
    """Conversations of the tasks, long and short, and windows of library source."""
    rng, found, left = Random(f"{seed} zero tuning"), list[TuningExample](), tokens
    shares = {"code": PARTS.code, "long": PARTS.long, "short": 1 - PARTS.code - PARTS.long}
    while left > 0:
        kind = rng.choices(list(shares), list(shares.values()))[0]
        if kind == "code":
            ids = mixture.source(rng, PARTS.row // 3, 1).ids[0].tolist()
            one = TuningExample(ids, [True] * len(ids))
        else:
            pieces = mixture.long_row(rng, PARTS.row) if kind == "long" else mixture.short_row(rng, PARTS)
            one = TuningExample(
                [token for ids, _ in pieces for token in ids], [learn for ids, learn in pieces for _ in ids]
            )
        if len(one.tokens) <= 2 * PARTS.row and any(one.learned[1:]):
            found.append(one)
            left -= len(one.tokens)
    return found


def search(loss: Loss, shape: tuple[int, int]) -> Iterator[TuningTrial]:
    """Everything that is tried, dense attention first. `loss` is asked in an order that its answers alone decide."""
    none = torch.zeros(shape)
    yield (dense := TuningTrial("none", 1.0, none, loss(none)))
    helped = torch.zeros(shape, dtype=torch.bool)
    for layer in range(shape[0]):
        for head in range(shape[1]):
            one = torch.zeros(shape, dtype=torch.bool)
            one[layer, head] = True
            yield (trial := _tried(loss, f"layer {layer} head {head}", one, TRIED))
            helped[layer, head] = trial.loss < dense.loss
    classes = {"up": helped, "down": ~helped, "all": torch.ones(shape, dtype=torch.bool)}
    for name, heads in classes.items():
        for gamma in GAMMAS if bool(heads.any()) else ():
            yield _tried(loss, name, heads, gamma)


def _tried(loss: Loss, name: str, heads: Tensor, gamma: float) -> TuningTrial:
    lift = torch.where(heads, torch.tensor(gamma).log(), torch.zeros(()))
    return TuningTrial(name, gamma, lift, loss(lift))


@torch.inference_mode()
def mean_loss(model: Model, examples: Sequence[TuningExample], attend: Any) -> float:
    """Nats per token to be predicted, each given the true tokens before it."""
    total, count = 0.0, 0
    for group in _groups(examples):
        for logits, one in zip(logits_of(model, [each.tokens for each in group], attend), group, strict=True):
            wanted = torch.tensor(one.learned[1:])
            scores = logits[:-1][wanted].float().log_softmax(-1)
            total -= float(scores.gather(1, torch.tensor(one.tokens[1:])[wanted][:, None]).sum())
            count += int(wanted.sum())
    return total / count


def _groups(examples: Sequence[TuningExample]) -> Iterator[list[TuningExample]]:
    group, rows = list[TuningExample](), 0
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
