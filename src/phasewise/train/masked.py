"""Low-rank weights learned under a mask, for methods in which rows see less than all before them, prompts too.

The base stays frozen. Every token of the training mixture is computed as it will be served: hidden from it, layer by
layer, is what the method hides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.model.artefacts import Artefact
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder, TokenBlock, losses
from phasewise.train.device import halved
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Stage
from phasewise.train.passes import Pass
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, weighed

TOKENS = 2_400_000  # padding included
RATE = 3e-3
STAGES = (
    Stage(0.4, 512, 4096, code=0.4, long=0.3, copies=0.2),
    Stage(0.8, 1024, 6144, code=0.35, long=0.4, copies=0.15),
    Stage(1.0, 2048, 8192, code=0.3, long=0.5, copies=0.1),
)
DECAY = ((0.4, 1.0), (1.0, 0.01))


@dataclass(frozen=True)
class Mask:
    """In these layers a row at position `at` sees one at `rows`, not behind it, where `seen(at, rows)` says so; in all
    others it sees everything."""

    layers: Collection[int]
    seen: Callable[[Tensor, Tensor], Tensor]

    def over(self, blocks: Sequence[TokenBlock]) -> Callable[[int, int], Tensor | None]:
        """The tensors that a `Pass` asks for; made once for all layers."""
        made: dict[int, Tensor] = {}

        def sees(layer: int, block: int) -> Tensor | None:
            if layer not in self.layers:
                return None
            if block not in made:
                made[block] = self._of(blocks[block].positions)
            return made[block]

        return sees

    def on(self, blocks: Sequence[TokenBlock], delta: LowRank | None) -> Pass:
        return Pass(sees=self.over(blocks), delta=delta)

    def _of(self, positions: Tensor) -> Tensor:
        """bool [rows or 1, length, length]; 1 where all rows stand at the same positions."""
        if bool((positions == positions[:1]).all()):
            positions = positions[:1]
        own = torch.ones(2 * positions.shape[1:], dtype=torch.bool, device=positions.device).tril_()
        return own & self.seen(positions[:, :, None], positions[:, None])


class HiddenRows(Protocol):
    """A mask over rows: where it holds, and the pass that it makes of blocks and low-rank weights."""

    @property
    def layers(self) -> Collection[int]: ...

    def on(self, blocks: Sequence[TokenBlock], delta: LowRank | None) -> Pass: ...


def start(made: Artefact) -> TrainingRun[LowRank]:
    """A fresh run; the frozen base is no part of it. What a mask hides is known by the method's knobs."""
    delta = LowRank(made.shapes)
    optimizer = AdamW(delta.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return TrainingRun(delta, [optimizer], settings={"method": made.setting})


def masked_loss(
    twin: DenseDecoder, delta: LowRank | None, mask: HiddenRows, batch: tuple[list[TokenBlock], list[TokenBlock]]
) -> StepLoss:
    """Cross-entropy of what follows under the mask."""
    source, tasks = batch
    blocks = [*source, *tasks]
    with halved(twin.embed_tokens.weight.device):
        each = losses(twin, blocks, mask.on(blocks, delta))
    code, task = torch.cat(each[: len(source)]), torch.cat(each[len(source) :])
    return weighed(code, task, sum(block.ids.numel() for block in blocks))


def tune(made: Artefact, mask: HiddenRows, job: ArtefactJob, usual: int = TOKENS) -> Path:
    """Train the low-rank weights of an artefact; `job.out` gets checkpoint.pt, losses.csv and the artefact."""
    if not mask.layers:
        raise UserError(f"{made.setting}: its mask covers the whole context: choose a smaller window")
    base, twin = job.base()
    torch.manual_seed(job.seed)
    tokens = job.tokens or usual
    run = start(made)
    if job.resume:
        run.read(job.checkpoint)

    def save(run: TrainingRun[LowRank]) -> None:
        job.save(base, made, run.model.tensors(), tokens)

    def loss(stage: Stage, batch: tuple[list[TokenBlock], list[TokenBlock]]) -> StepLoss:
        return masked_loss(twin, run.model, mask, batch)

    fit(run, loss, job.mixture(), TrainingRecipe(tokens, STAGES, decay=DECAY), job.out, save)
    return job.save(base, made, run.model.tensors(), tokens)
