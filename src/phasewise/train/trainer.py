"""The training loop: seeded, resumable to the bit, with a warm-up / stable / decay schedule.

Matrices are trained with Muon (orthogonalised momentum, arXiv 2502.16982), embeddings and norms with AdamW.
"""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.optim import AdamW, Muon, Optimizer

from phasewise.train.dense import Block, Dense, losses
from phasewise.train.mixture import Mixture, Stage

COLUMNS = ("step", "tokens", "code_loss", "task_loss", "pace", "tokens_per_second")
TASK_WEIGHT = 2.0


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    tokens: int
    curriculum: tuple[Stage, ...]
    opening_rate: float = 0.02  # Muon, matrices that read the residual stream
    closing_rate: float = 0.005  # Muon, matrices that write it: lower, so that layers do not drown the embedding
    embedding_rate: float = 0.04
    norm_rate: float = 4e-3
    warmup_steps: int = 30
    # (progress, learning-rate factor) with straight lines between
    decay: tuple[tuple[float, float], ...] = ((0.3, 1.0), (0.92, 0.3), (1.0, 0.01))
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


@dataclass
class Run:
    """Everything that a checkpoint holds."""

    model: Dense
    optimizers: list[Optimizer]
    step: int = 0
    tokens: int = 0

    def write(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def read(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens = state["step"], state["tokens"]


def start(model: Dense, recipe: Recipe) -> Run:
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
    optimizers: list[Optimizer] = [
        Muon(matrices, weight_decay=0.0, momentum=0.95),
        AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return Run(model, optimizers)


def train(run: Run, mixture: Mixture, recipe: Recipe, out: Path, saved: Callable[[Run], None] | None = None) -> None:
    """Train to the end of the recipe from wherever `run` stands; `out` gets checkpoint.pt and losses.csv.

    `saved` is called after every checkpoint.
    """
    out.mkdir(parents=True, exist_ok=True)
    plan = list(recipe.steps())
    last_save = time.monotonic()
    with _log(out / "losses.csv", run.step) as log, _bar() as bar:
        shown = bar.add_task("train", total=len(plan), completed=run.step, note="")
        while run.step < len(plan):
            stage, progress = plan[run.step]
            pace = recipe.pace(run.step, progress)
            set_stage(run, stage, pace)
            began = time.perf_counter()
            source, tasks = mixture.step(run.step, stage)
            code_loss, task_loss = update(run, source, tasks)
            count = sum(block.ids.numel() for block in source + tasks)
            run.step, run.tokens = run.step + 1, run.tokens + count
            speed = count / (time.perf_counter() - began)
            log.row(run.step, run.tokens, f"{code_loss:.5f}", f"{task_loss:.5f}", f"{pace:.4f}", f"{speed:.0f}")
            note = f"code {code_loss:.3f}  tasks {task_loss:.3f}  {speed:,.0f} tok/s"
            bar.update(shown, completed=run.step, note=note)
            if run.step == len(plan) or time.monotonic() - last_save > recipe.checkpoint_seconds:
                run.write(out / "checkpoint.pt")
                last_save = time.monotonic()
                if saved:
                    saved(run)


def set_stage(run: Run, stage: Stage, pace: float) -> None:
    """Set the depth and the learning rates of the next step."""
    run.model.stride = stage.stride
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * pace
    embedding = run.optimizers[1].param_groups[0]
    embedding["lr"] *= stage.embedding


def update(run: Run, source: list[Block], tasks: list[Block]) -> tuple[float, float]:
    """One optimiser step; returns the mean loss per source token and per task token before it."""
    device = run.model.embed_tokens.weight.device
    blocks = [Block(*(part.to(device) for part in block)) for block in (*source, *tasks)]
    with torch.autocast(device.type, torch.bfloat16):
        each = losses(run.model, blocks)
    code, task = torch.cat(each[: len(source)]), torch.cat(each[len(source) :])
    total = code.sum() + TASK_WEIGHT * task.sum()
    torch.autograd.backward(total / (len(code) + TASK_WEIGHT * len(task)))
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    means = float(code.detach().mean()), float(task.detach().mean())
    if not math.isfinite(sum(means)):
        raise FloatingPointError(f"the loss became {sum(means)} at step {run.step}: lower the learning rate")
    return means


class _log:
    """losses.csv, cut back to the resumed step when opened and flushed at every row."""

    def __init__(self, path: Path, step: int) -> None:
        kept: list[list[str]] = []
        if step and path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.reader(file) if row[0].isdigit() and int(row[0]) <= step]
        self.file = path.open("w", newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerows([COLUMNS, *kept])

    def row(self, *values: object) -> None:
        self.writer.writerow(values)
        self.file.flush()

    def __enter__(self) -> _log:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description} {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
