"""Prompts and replies as a serving engine sees them: prompts whole, then replies token by token.

For whatever runs the two in different ways (other layers, other weights). The first token of a reply is what the prompt
itself predicts, so the tokens learned are those after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.train.dense import TokenBlock
from phasewise.train.mixture import NO_LOSS, Mixture, Stage

REPLY = 64
"""Tokens of library source that are written in one go."""


class PromptReplyBatch(NamedTuple):
    """Rows of like length, each a prompt and its reply, both padded on the right."""

    prompts: TokenBlock
    real: Tensor  # bool [rows, prompt]: no padding
    replies: TokenBlock  # ids are the reply but for its last token, targets the tokens after them
    points: Sequence[tuple[int, int]] = ()  # (row, n): its first n prompt tokens are to be a prompt as well

    @property
    def tokens(self) -> int:
        return self.prompts.ids.numel() + self.replies.ids.numel()


Pair = tuple[list[int], list[int]]  # token ids of a prompt and of its reply


class Exchanges:
    """Batches of prompts and replies, of library source and of tasks: a function of the mixture's seed and the step.

    Prompts of source have up to `points` more points each, behind which `ahead` of their tokens follow.
    """

    def __init__(self, mixture: Mixture, points: int = 0, ahead: int = 0) -> None:
        self.mixture, self.points, self.ahead = mixture, points, ahead

    def step(self, step: int, stage: Stage) -> tuple[list[PromptReplyBatch], list[PromptReplyBatch]]:
        """The step's exchanges of library source, and of tasks."""
        rng = Random(f"{self.mixture.seed} exchanges {step}")
        shares = (stage.code, stage.long, 1 - stage.code - stage.long)
        source, long, short = (
            self._fill(rng, stage, kind, share) for kind, share in zip(("source", "long", "short"), shares)
        )
        drawn = Random(f"{self.mixture.seed} points {step}")
        return [self._pointed(part, drawn) for part in self._blocks(source)], self._blocks(long + short)

    def _pointed(self, part: PromptReplyBatch, rng: Random) -> PromptReplyBatch:
        """With its points, drawn without replacement."""
        if not self.points:
            return part
        found: list[tuple[int, int]] = []
        for row, length in enumerate(part.real.sum(1).tolist()):
            room = range(1, length - self.ahead + 1)
            found += [(row, n) for n in sorted(rng.sample(room, min(self.points, len(room))))]
        return part._replace(points=found)

    def _fill(self, rng: Random, stage: Stage, kind: str, share: float) -> list[Pair]:
        pairs: list[Pair] = []
        budget = round(stage.step_tokens * share)
        while budget > 0:
            prompt, reply = self._source(rng, stage) if kind == "source" else self._task(rng, stage, kind == "long")
            if len(reply) > 1 and len(prompt) + len(reply) <= stage.row + 1:
                pairs.append((prompt, reply))
                budget -= len(prompt) + len(reply)
        return pairs

    def _source(self, rng: Random, stage: Stage) -> Pair:
        """A stretch of source, most often not far from a beginning."""
        before, stream = rng.randint(1, rng.choice((64, stage.row - REPLY))), self.mixture.stream
        start = rng.randrange(len(stream) - before - REPLY)
        ids = stream[start : start + before + REPLY].tolist()
        return self.mixture.begin + ids[:before], ids[before:]

    def _task(self, rng: Random, stage: Stage, long: bool) -> Pair:
        """Any of a conversation's replies, after all that came before it."""
        row = self.mixture.long_row(rng, stage.row) if long else self.mixture.short_row(rng, stage)
        at = rng.choice([index for index, (_, learned) in enumerate(row) if learned])
        return [token for ids, _ in row[:at] for token in ids], row[at][0]

    def _blocks(self, pairs: list[Pair]) -> list[PromptReplyBatch]:
        """Pairs sorted by length, in blocks that pad no prompt by more than half."""
        blocks: list[list[Pair]] = []
        for pair in sorted(pairs, key=lambda pair: len(pair[0])):
            if not blocks or len(pair[0]) > 1.5 * len(blocks[-1][0][0]) + 16:
                blocks.append([])
            blocks[-1].append(pair)
        return [exchange(block, self.mixture.pad) for block in blocks]


def exchange(pairs: Sequence[Pair], pad: int) -> PromptReplyBatch:
    """Pairs in one padded block; a reply's positions go on from its own prompt's."""
    lengths = torch.tensor([len(prompt) for prompt, _ in pairs])
    prompts = _padded([prompt for prompt, _ in pairs], pad)
    ids = _padded([reply[:-1] for _, reply in pairs], pad)
    targets = _padded([reply[1:] for _, reply in pairs], NO_LOSS)
    real = torch.arange(prompts.shape[1]) < lengths[:, None]
    positions = torch.arange(ids.shape[1]) + lengths[:, None]
    return PromptReplyBatch(
        TokenBlock.of(prompts, torch.full_like(prompts, NO_LOSS)), real, TokenBlock(ids, targets, positions)
    )


def _padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    out = torch.full((len(rows), max(map(len, rows))), filler)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row)
    return out
