"""Validates a model in training on examples that are never trained on: a row of validation.csv now and then.

An answer counts as exact if every token of it is the most likely one after the right tokens before it: that is so if
and only if greedy decoding writes it. No random numbers are drawn, so a run does not hang on when it was looked at.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch.nn import functional as F

from phasewise.known.corpus import sources
from phasewise.train.dense import DenseDecoder, TokenBlock
from phasewise.train.device import halved
from phasewise.train.log import Log
from phasewise.train.mixture import Mixture, pad_rows
from phasewise.train.saturation import largest_score
from phasewise.train.tasks import ASKED, TASKS, turns
from phasewise.train.tokenizer import plain
from phasewise.train.trainer import TrainingRun
from phasewise.train.wording import Piece

EXAMPLES, LENGTH, WINDOWS, WINDOW = 16, 160, 16, 256
AT_ONCE = 8  # rows; the logits of all of them are in memory


class Validation:
    """Fixed held-out examples of every task and windows of held-out source, looked at every `minutes`."""

    def __init__(self, mixture: Mixture, out: Path, minutes: float) -> None:
        self.path, self.pause = out / "validation.csv", 60 * minutes
        self.rows = {task: task_rows(mixture, task) for task in TASKS}
        self.rows["code"] = code_rows(mixture)
        self.pad, self.last = mixture.pad, time.monotonic()

    def when_due(self, run: TrainingRun[DenseDecoder]) -> None:
        if time.monotonic() - self.last > self.pause:
            self.look(run)

    def look(self, run: TrainingRun[DenseDecoder]) -> dict[str, float]:
        """Write a row: per task the share of exact answers, the loss on source in nats per token, and the largest
        attention score there."""
        found = {name: judged(run.model, rows, self.pad) for name, rows in self.rows.items()}
        shown = {f"{name}_exact": exact for name, (_, exact) in found.items() if name != "code"}
        shown["code_loss"] = found["code"][0]
        block = pad_rows(self.rows["code"][:AT_ONCE], self.pad)
        shown["largest_score"] = largest_score(run.model, TokenBlock(*(part.to(_device(run.model)) for part in block)))
        with Log(self.path, run.step) as log:
            log.row({"step": run.step, "tokens": run.tokens, **{name: f"{v:.4f}" for name, v in shown.items()}})
        self.last = time.monotonic()
        return shown


def task_rows(mixture: Mixture, task: str) -> list[list[Piece]]:
    """Conversations up to the answer that `phasewise eval` asks for; only that answer is learned."""
    rng, rows = Random(f"validation {task}"), []
    for _ in range(EXAMPLES):
        pieces = mixture.chat(turns(task, rng, LENGTH, evaluation=True)[: ASKED.get(task, 0) + 1], None)
        rows.append([(ids, at == len(pieces) - 1) for at, (ids, _) in enumerate(pieces)])
    return rows


def code_rows(mixture: Mixture) -> list[list[Piece]]:
    ids, rng = plain(mixture.tokenizer, "\n\n".join(sources(held_out=True).values())), Random("validation code")
    starts = [rng.randrange(len(ids) - WINDOW) for _ in range(WINDOWS)]
    return [[(mixture.begin, False), (ids[start : start + WINDOW], True)] for start in starts]


@torch.no_grad()
def judged(model: DenseDecoder, rows: Sequence[Sequence[Piece]], pad: int) -> tuple[float, float]:
    """Mean loss of the learned tokens (nats), and the share of rows whose learned tokens are all the most likely."""
    total, count, exact = 0.0, 0, 0
    device = _device(model)
    for at in range(0, len(rows), AT_ONCE):
        block = TokenBlock(*(part.to(device) for part in pad_rows(rows[at : at + AT_ONCE], pad)))
        wanted = block.targets >= 0
        with halved(device):
            logits = F.linear(model.hidden([block])[wanted.flatten()], model.embed_tokens.weight).float()
        targets = block.targets[wanted]
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
        count += len(targets)
        wrong = wanted.nonzero()[:, 0][logits.argmax(-1) != targets]
        exact += len(block.ids) - len(set(wrong.tolist()))
    return total / count, exact / len(rows)


def _device(model: DenseDecoder) -> torch.device:
    return model.embed_tokens.weight.device
