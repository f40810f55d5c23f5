"""The pocket model's data of each step: a pure function of (seed, step), so a resumed run is the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from phasewise.known.corpus import sources
from phasewise.model.source import Source
from phasewise.train.chat import SYSTEM, talk
from phasewise.train.dense import TokenBlock
from phasewise.train.tasks import TaskTurn, turns
from phasewise.train.tokenizer import plain
from phasewise.train.wording import ChatML, Piece, Wording, wording

LONG_TASKS = {"recall": 0.7, "passkey": 0.3}
SHORT_TASKS = {"reverse": 2.0, "sort": 6.0, "arithmetic": 4.0, "json": 1.0, "edit": 7.0, "list": 2.0, "recall": 1.5,
               "second": 4.0, "talk": 0.5}  # fmt: skip
NO_LOSS = -1
STRETCHED = 2048
"""Positions up to here are seen in training: the model's context."""


@dataclass(frozen=True)
class Stage:
    """One part of the curriculum, in force until `until` (a fraction of the run)."""

    until: float
    row: int  # longest row, tokens
    step_tokens: int  # padded tokens per optimiser step
    code: float  # share of the step's tokens that is library source
    long: float  # share of the step's tokens that is long-context tasks
    copies: float  # share of the short exchanges that is plain copying, which teaches looking back early
    short: int = 128  # size of short tasks, tokens
    drawn: int = 1  # of so many copies the one with most tokens is taken: long ones and random letters are hard
    embedding: float = 1.0  # factor on the embedding's learning rate: high at first, when every row must move


CURRICULUM = (
    Stage(0.05, 256, 2048, code=0.25, long=0.10, copies=0.5, short=64),
    Stage(0.15, 512, 4096, code=0.35, long=0.15, copies=0.2),
    Stage(0.50, 512, 4096, code=0.45, long=0.15, copies=0.12, embedding=0.35),
    Stage(0.85, 1024, 6144, code=0.40, long=0.20, copies=0.10, embedding=0.35),
    Stage(0.92, 2048, 8192, code=0.35, long=0.30, copies=0.10, embedding=0.35),
    Stage(1.00, 768, 6144, code=0.30, long=0.16, copies=0.35, drawn=2, embedding=0.35),
)
BATCH = max(stage.step_tokens for stage in CURRICULUM)
"""Tokens of the largest steps."""


def batched(curriculum: Sequence[Stage], tokens: int) -> tuple[Stage, ...]:
    """The stages with all their steps larger or smaller alike, the largest of `tokens`; no step is below one row."""
    largest = max(stage.step_tokens for stage in curriculum)
    return tuple(
        replace(stage, step_tokens=max(stage.row, round(stage.step_tokens * tokens / largest))) for stage in curriculum
    )


class Mixture:
    """Batches of library source and generated tasks over one tokenizer, in the pocket model's layout or another."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], seed: int, wording: Wording | None = None) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.wording = wording or ChatML(tokenizer)
        self.pad, self.begin = self.wording.pad, self.wording.begin
        encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ids = [np.asarray([*item.ids, self.wording.end], dtype=np.int32) for item in encoded]
        order = Random(f"{seed} files").sample(range(len(ids)), len(ids))
        self.stream = np.concatenate([ids[index] for index in order])

    def step(self, step: int, stage: Stage) -> tuple[list[TokenBlock], list[TokenBlock]]:
        """The step's source blocks and task blocks."""
        rng = Random(f"{self.seed} step {step}")
        source = self.source(rng, stage.row, max(1, round(stage.step_tokens * stage.code / stage.row)))
        long = self._conversations(rng, stage, long=True)
        short = self._conversations(rng, stage, long=False)
        stretched = [stretch(rng, block) for block in in_blocks(long, self.pad)]
        return [source], stretched + in_blocks(short, self.pad)

    def source(self, rng: Random, row: int, rows: int) -> TokenBlock:
        """Rows of library source from anywhere in it, every token learned."""
        starts = [rng.randrange(len(self.stream) - row - 1) for _ in range(rows)]
        length = row + 1 - len(self.begin)
        taken = np.stack([np.append(self.begin, self.stream[start : start + length]) for start in starts])
        block = torch.from_numpy(taken.astype(np.int64))  # [rows, row + 1]
        return TokenBlock.of(block[:, :-1], block[:, 1:])

    def _conversations(self, rng: Random, stage: Stage, long: bool) -> list[list[Piece]]:
        share = stage.long if long else 1 - stage.code - stage.long
        budget, rows = round(stage.step_tokens * share), []
        while budget > 0:
            row = self.long_row(rng, stage.row) if long else self.short_row(rng, stage)
            if size(row) <= stage.row + 1:
                rows.append(row)
                budget -= size(row)
        return sorted(rows, key=size)

    def long_row(self, rng: Random, row: int) -> list[Piece]:
        """A long-context task with several questions, of any length up to the row."""
        task = rng.choices(list(LONG_TASKS), list(LONG_TASKS.values()))[0]
        low = 64 if rng.random() < 0.5 else row // 2
        return self.chat(turns(task, rng, rng.randint(low, row) - 80, evaluation=False), None)

    def short_row(self, rng: Random, stage: Stage) -> list[Piece]:
        """One to three short exchanges, now and then under a system prompt."""
        conversation: list[TaskTurn] = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            others = rng.choices(list(SHORT_TASKS), list(SHORT_TASKS.values()))[0]
            task, size = "copy" if rng.random() < stage.copies else others, rng.randint(stage.short // 4, stage.short)
            if task == "copy":
                copies = [turns(task, rng, size, False) for _ in range(stage.drawn)]
                hardest = max(copies, key=self._length)
                conversation += hardest
            else:
                conversation += [talk(rng)] if task == "talk" else turns(task, rng, size, False)
        return self.chat(conversation, rng.choice(SYSTEM) if rng.random() < 0.12 else None)

    def _length(self, conversation: Sequence[TaskTurn]) -> int:
        return sum(len(plain(self.tokenizer, turn.answer)) for turn in conversation)

    def chat(self, conversation: Sequence[TaskTurn], system: str | None) -> list[Piece]:
        """Token pieces of a conversation; only replies and their ends are learned."""
        return self.wording.chat(conversation, system)


def of_model(files: Source, ends: Sequence[int], seed: int) -> Mixture:
    """Library source and tasks as this model reads them (`wording`), for whatever learns beside a model."""
    return Mixture(files.tokenizer(), list(sources(held_out=False).values()), seed, wording(files, ends))


def in_blocks(rows: Sequence[list[Piece]], pad: int) -> list[TokenBlock]:
    """Rows by length, in blocks that pad the shortest by at most a third."""
    blocks: list[list[list[Piece]]] = []
    for row in sorted(rows, key=size):
        if not blocks or size(row) > 1.5 * size(blocks[-1][0]):
            blocks.append([])
        blocks[-1].append(row)
    return [pad_rows(block, pad) for block in blocks]


def size(row: Sequence[Piece]) -> int:
    """Tokens of a conversation."""
    return sum(len(ids) for ids, _ in row)


def pad_rows(rows: Sequence[Sequence[Piece]], pad: int) -> TokenBlock:
    """Ids and next-token targets of rows padded on the right to the longest."""
    longest = max(map(size, rows))
    ids = torch.full((len(rows), longest), pad)
    targets = torch.full((len(rows), longest), NO_LOSS)
    for index, row in enumerate(rows):
        flat = [token for piece, _ in row for token in piece]
        learned = [token if learn else NO_LOSS for piece, learn in row for token in piece]
        ids[index, : len(flat)] = torch.tensor(flat)
        targets[index, : len(flat) - 1] = torch.tensor(learned[1:])
    return TokenBlock.of(ids, targets)


def unpadded(ids: Tensor, pad: int) -> Tensor:
    """A bool mask of rows [rows, length], True where they are no padding. What pads may stand inside a row too: the end
    token of a model that has no other."""
    return (ids != pad).flip(-1).cumsum(-1).flip(-1) > 0


def stretch(rng: Random, block: TokenBlock) -> TokenBlock:
    """Half of the time, leave a random gap of positions at a random place of every row.

    Short rows then teach the distances of long ones (positional skip-wise training, arXiv 2309.10400).
    """
    rows, length = block.ids.shape
    if rng.random() < 0.5 or length >= STRETCHED:
        return block
    gaps = torch.tensor([[rng.randrange(STRETCHED - length)] for _ in range(rows)])
    places = torch.tensor([[rng.randrange(length)] for _ in range(rows)])
    return block._replace(positions=block.positions + gaps * (block.positions >= places))
