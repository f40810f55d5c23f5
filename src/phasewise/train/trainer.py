"""The training loop: seeded, resumable to the bit, with a warm-up / stable / decay schedule.

`fit` is the loop of everything that is trained here: whole models, heads, adapters. What differs is handed in: the
parameters with their optimisers (`TrainingRun`), the data of a step, and the loss. `start`, `train` and `update` are
whole models: matrices with Muon (orthogonalised momentum, arXiv 2502.16982), embeddings and norms with AdamW.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from phasewise.errors import UserError
from phasewise.train.dense import DenseDecoder, TokenBlock, losses
from phasewise.train.device import Data, batches, computes_in_bfloat16, device, halved
from phasewise.train.log import Log
from phasewise.train.memory import give_back, keep_freed_memory
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.muon import Muon

TASK_WEIGHT = 2.0
Batch = TypeVar("Batch")


class StepLoss(NamedTuple):
    """The loss of one step: what is differentiated, what losses.csv shows (`<name>_loss`), and the tokens seen."""

    total: Tensor
    parts: dict[str, float]
    tokens: int


@dataclass(frozen=True)
class TrainingRecipe:
    """The length and the rates of a training run. The rates are those of whole models (`start`)."""

    tokens: int
    curriculum: tuple[Stage, ...]
    opening_rate: float = 0.02  # Muon, matrices that read the residual stream
    closing_rate: float = 0.005  # Muon, matrices that write it: lower, so that layers do not drown the embedding
    embedding_rate: float = 0.04
    norm_rate: float = 4e-3
    # of matrices; without it queries and keys grow until attention is one row and learns no more
    weight_decay: float = 0.1
    warmup_steps: int = 30
    # (progress, learning-rate factor) with straight lines between
    decay: tuple[tuple[float, float], ...] = ((0.1, 1.0), (1.0, 0.01))
    checkpoint_seconds: float = 150.0

    def steps(self) -> Iterator[tuple[Stage, float]]:
        """The stage and progress (0 to 1, in tokens) of every step."""
        seen = 0
        while seen < self.tokens:
            progress = seen / self.tokens
            stage = next(stage for stage in self.curriculum if progress < stage.until)
            yield stage, progress
            seen += stage.step_tokens

    def pace(self, step: int, progress: float) -> float:
        """The learning-rate factor: linear warm-up, then the points of `decay`."""
        points, factors = zip(*self.decay, strict=True)
        return float(min(1.0, (step + 1) / self.warmup_steps) * np.interp(progress, points, factors))


Trained = TypeVar("Trained", bound=nn.Module)


@dataclass
class TrainingRun(Generic[Trained]):
    """Everything that a checkpoint holds. `model` is what is trained, and only that: a frozen base is no part of it.

    It goes where training computes. Every parameter group has its rate at pace 1 in "peak".
    """

    model: Trained
    optimizers: list[Optimizer]
    step: int = 0
    tokens: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # what a resumed run must not change, by option

    def __post_init__(self) -> None:
        self.model.to(device())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def write(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "settings": self.settings,
        }
        whole = io.BytesIO()  # torch's own writing hides why it failed; a full disk shall say so
        torch.save(state, whole)
        path.with_suffix(".new").write_bytes(whole.getbuffer())
        os.replace(path.with_suffix(".new"), path)

    def read(self, path: Path) -> None:
        """Stand where a checkpoint stood. Raises UserError if that run had other settings."""
        state = same_settings(path, self.settings)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens = state["step"], state["tokens"]


def same_settings(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds. Raises UserError if that run had other settings."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    before = state.get("settings", {})
    for name in sorted(before.keys() | settings.keys()):
        was, now = before.get(name), settings.get(name)
        if was != now:
            raise UserError(f"{path}: that run had {name}={was!r}, this one has {now!r}: resume it as it was, or "
                            "start anew elsewhere")  # fmt: skip
    return state


def start(model: DenseDecoder, recipe: TrainingRecipe) -> TrainingRun[DenseDecoder]:
    """A fresh run with its optimizers."""
    named = list(model.named_parameters())
    closing = [p for name, p in named if name.endswith(("o_proj.weight", "down_proj.weight"))]
    opening = [p for name, p in named if p.ndim == 2 and "_proj." in name and not any(p is other for other in closing)]
    norms = [p for _, p in named if p.ndim == 1]
    matrices = [
        {"params": opening, "lr": recipe.opening_rate},
        {"params": closing, "lr": recipe.closing_rate},
    ]
    rest = [
        {"params": [model.embed_tokens.weight], "lr": recipe.embedding_rate},
        {"params": norms, "lr": recipe.norm_rate},
    ]
    half = computes_in_bfloat16(model.embed_tokens.weight.device.type)
    optimizers: list[Optimizer] = [
        Muon(matrices, torch.bfloat16 if half else torch.float32, weight_decay=recipe.weight_decay, momentum=0.95),
        AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10),
    ]
    return TrainingRun(model, optimizers)


def train(
    run: TrainingRun[DenseDecoder],
    mixture: Mixture,
    recipe: TrainingRecipe,
    out: Path,
    saved: Callable[[TrainingRun[DenseDecoder]], None] | None = None,
) -> None:
    """Train a whole model to the end of the recipe from wherever `run` stands."""
    fit(run, lambda stage, batch: whole_loss(run, stage, batch), mixture, recipe, out, saved)


def whole_loss(
    run: TrainingRun[DenseDecoder], stage: Stage, batch: tuple[list[TokenBlock], list[TokenBlock]]
) -> StepLoss:
    """Cross-entropy of a model's next tokens, with the stage's pace for the embedding."""
    model, (source, tasks) = run.model, batch
    run.optimizers[1].param_groups[0]["lr"] *= stage.embedding
    blocks = [*source, *tasks]
    with halved(model.embed_tokens.weight.device):
        each = losses(model, blocks)
    code, task = torch.cat(each[: len(source)]), torch.cat(each[len(source) :])
    return weighed(code, task, sum(block.ids.numel() for block in blocks))


def weighed(code: Tensor, task: Tensor, tokens: int) -> StepLoss:
    """The mean of both kinds of losses (nats, one per token), tasks weighing more."""
    total = (code.sum() + TASK_WEIGHT * task.sum()) / (len(code) + TASK_WEIGHT * len(task))
    means = {"code": float(code.detach().mean()), "task": float(task.detach().mean())}
    return StepLoss(total, means, tokens)


def fit(
    run: TrainingRun[Trained], loss: Callable[[Stage, Batch], StepLoss], data: Data[Batch], recipe: TrainingRecipe,
    out: Path,
    saved: Callable[[TrainingRun[Trained]], None] | None = None,
) -> None:  # fmt: skip
    """Train to the end of the recipe from wherever `run` stands; `out` gets checkpoint.pt and losses.csv.

    What steps see is brought to where the run's model is. `saved` is called after every checkpoint. Raises
    FloatingPointError when the loss is no number any more.
    """
    out.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    plan = list(recipe.steps())
    coming = batches(data, [stage for stage, _ in plan], run.step, run.device)
    last_save = time.monotonic()
    with Log(out / "losses.csv", run.step) as log, bar() as shown:
        task = shown.add_task("train", total=len(plan), completed=run.step, note="")
        while run.step < len(plan):
            stage, progress = plan[run.step]
            pace = recipe.pace(run.step, progress)
            began = time.perf_counter()
            _set_pace(run.optimizers, pace)
            done = loss(stage, next(coming))
            update(run, done)
            run.step, run.tokens = run.step + 1, run.tokens + done.tokens
            speed = done.tokens / (time.perf_counter() - began)
            log.row(_logged(run, done.parts, pace, speed))
            note = "  ".join(f"{name} {value:.3f}" for name, value in done.parts.items())
            shown.update(task, completed=run.step, note=f"{note}  {speed:,.0f} tok/s")
            if run.step == len(plan) or time.monotonic() - last_save > recipe.checkpoint_seconds:
                run.write(out / "checkpoint.pt")
                give_back()
                last_save = time.monotonic()
                if saved:
                    saved(run)


def _set_pace(optimizers: list[Optimizer], pace: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * pace


def update(run: TrainingRun[Trained], loss: StepLoss) -> None:
    """One optimiser step."""
    if not math.isfinite(sum(loss.parts.values())):
        raise FloatingPointError(f"the loss became {loss.parts} at step {run.step}: lower the learning rate")
    torch.autograd.backward(loss.total)
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _logged(run: TrainingRun[Any], parts: dict[str, float], pace: float, speed: float) -> dict[str, object]:
    means = {f"{name}_loss": f"{mean:.5f}" for name, mean in parts.items()}
    return {"step": run.step, "tokens": run.tokens, **means, "pace": f"{pace:.4f}", "tokens_per_second": f"{speed:.0f}"}


def bar() -> Progress:
    """For a long run: tasks have a `note`."""
    return Progress(
        TextColumn("{task.description} {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
