"""Teach a pocket model what pads mean (LUD, arXiv 2405.15208): low-rank weights on all its linear layers, its own
weights frozen.

A lexical unit is a token and those right behind it to which the model gives at least `ALPHA`. Behind the token before a
unit stand pads, one for each token of the unit but the last, and one more: a pad learns the token after the one that it
stands for. The last of them foretells a token that the model is not sure of, so that it learns to be unsure. Pads see
the text up to their unit and the pads before them, and nobody else sees them, as in the engine. At all other rows the
tuned model is held to what it said before.

The paper writes pads into the text itself, whose later tokens then read rows of pads. Here they read those of the
tokens, as they do when the unit has been accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.load import config_of
from phasewise.methods.decode.lud import pad_of
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder, TokenBlock
from phasewise.train.device import halved
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import NO_LOSS, Stage
from phasewise.train.passes import Pass
from phasewise.train.trainer import StepLoss, TrainingRecipe
from phasewise.train.tuning import Lesson, teach

TOKENS = 600_000  # of texts, padding included, without pads
PADS, ALPHA = 3, 0.9
STAGES = (Stage(1.0, 512, 3072, code=0.4, long=0.15, copies=0.2),)
DECAY = ((0.4, 1.0), (1.0, 0.01))
KEEP = 1.0  # weight of the divergence from the base, beside the cross-entropy of pads


@dataclass(frozen=True, eq=False)
class PaddedBlock:
    """Rows of a text and its pads behind it: [rows, length + pads]."""

    block: TokenBlock
    sees: Tensor  # bool [rows, length + pads, length + pads]
    behind: Tensor  # bool [learned tokens, row by row]: a pad's


def unit_lengths(sure: Sequence[bool], learned: Sequence[bool], pads: int) -> list[tuple[int, int]]:
    """(place, tokens) of the units of a row: `place` is that of the token before a unit, which foretells its first.

    sure[i] and learned[i] are of the token after place i. Units follow one another, and have at most `pads` + 1 tokens.
    """
    found, at = list[tuple[int, int]](), 0
    while at < len(sure):
        size = 1
        while learned[at] and size <= pads and at + size < len(sure) and sure[at + size] and learned[at + size]:
            size += 1
        if learned[at]:
            found.append((at, size))
        at += size
    return found


def padded(block: TokenBlock, sure: Tensor, pads: int, pad: int) -> PaddedBlock:
    """A block with the pads of its units. `sure` bool [rows, length], of targets."""
    rows, length = block.ids.shape
    learned = block.targets >= 0
    placed: list[list[tuple[int, int]]] = []  # of each row: (place of the token before a unit, which pad of it)
    for its, some in zip(sure.tolist(), learned.tolist()):
        placed.append([(at, which) for at, size in unit_lengths(its, some, pads) for which in range(min(size, pads))])
    most = max(map(len, placed), default=0)
    at, which = torch.full((rows, most), -1), torch.zeros(rows, most, dtype=torch.int64)
    for row, its in enumerate(placed):
        for slot, (place, number) in enumerate(its):
            at[row, slot], which[row, slot] = place, number
    there = at >= 0
    target = (at + which + 1).clamp(0, length - 1)  # the pad stands for the token at + which + 1
    targets = torch.where(there & (at + which + 1 < length), block.targets.gather(1, target), NO_LOSS)
    positions = block.positions.gather(1, at.clamp_min(0)) + 1 + which
    sees = torch.zeros(rows, length + most, length + most, dtype=torch.bool)
    sees[:, :length, :length] = torch.ones(length, length, dtype=torch.bool).tril_()
    sees[:, length:, :length] = torch.arange(length) <= at[:, :, None]
    sees[:, length:, length:] = (at[:, :, None] == at[:, None]) & (which[:, :, None] >= which[:, None])
    sees |= torch.eye(length + most, dtype=torch.bool)
    whole = TokenBlock(
        torch.cat((block.ids, torch.full((rows, most), pad)), 1), torch.cat((block.targets, targets), 1),
        torch.cat((block.positions, positions), 1),
    )  # fmt: skip
    columns = torch.arange(length + most).expand(rows, -1)
    return PaddedBlock(whole, sees, (columns >= length)[whole.targets >= 0])


def unit_loss(twin: DenseDecoder, delta: LowRank, blocks: Sequence[TokenBlock], pad: int) -> StepLoss:
    """Cross-entropy of what pads say, and the divergence from the base at the rows of the text."""
    with halved(twin.embed_tokens.weight.device):
        with torch.no_grad():
            base = _logits(twin, blocks, Pass()).log_softmax(-1)
        targets = torch.cat([block.targets.flatten() for block in blocks])
        wanted = targets >= 0
        sure = torch.zeros_like(wanted)
        sure[wanted] = base.gather(1, targets[wanted, None])[:, 0].exp() >= ALPHA
        parts = torch.split(sure, [block.ids.numel() for block in blocks])
        laid = [padded(block, its.view_as(block.ids), PADS, pad) for block, its in zip(blocks, parts)]
        how = Pass(delta=delta, sees=lambda layer, number: laid[number].sees)
        now = _logits(twin, [one.block for one in laid], how).log_softmax(-1)
    behind = torch.cat([one.behind for one in laid])
    said = torch.cat([one.block.targets.flatten() for one in laid])
    pads = F.nll_loss(now[behind], said[said >= 0][behind], reduction="mean")
    kept = F.kl_div(now[~behind], base, reduction="none", log_target=True).sum(-1).mean()
    means = {"pads": float(pads.detach()), "kept": float(kept.detach())}
    return StepLoss(pads + KEEP * kept, means, sum(block.ids.numel() for block in blocks))


def _logits(twin: DenseDecoder, blocks: Sequence[TokenBlock], how: Pass) -> Tensor:
    """Logits float32 [learned, V]."""
    wanted = torch.cat([block.targets.flatten() for block in blocks]) >= 0
    return F.linear(twin.hidden(blocks, how)[wanted], twin.embed_tokens.weight).float()


def train(job: ArtefactJob) -> Path:
    """Teach `job.model` (`tuning.teach`); its chat template stays."""
    pad = pad_of(config_of(job.model))

    def loss(twin: DenseDecoder, delta: LowRank, batch: tuple[list[TokenBlock], list[TokenBlock]]) -> StepLoss:
        return unit_loss(twin, delta, [*batch[0], *batch[1]], pad)

    recipe = TrainingRecipe(job.tokens or TOKENS, STAGES, decay=DECAY)
    return teach(job, Lesson("units", loss, lambda mixture: mixture, recipe))
