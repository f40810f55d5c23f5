"""What the pocket model sees at each step: a pure function of (seed, step), so a resumed run is the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from phasewise.train.chat import SYSTEM, talk
from phasewise.train.tasks import Turn, turns
from phasewise.train.tokenizer import END_OF_TEXT, PAD, TURN_END, special_id

LONG_TASKS = {"recall": 0.7, "passkey": 0.3}
SHORT_TASKS = {"reverse": 1.5, "sort": 2.0, "arithmetic": 5.0, "json": 1.0, "edit": 3.0, "list": 2.0, "recall": 1.5,
               "talk": 0.5}  # fmt: skip
NO_LOSS = -1


@dataclass(frozen=True)
class Stage:
    """One part of the curriculum, in force until `until` (a fraction of the run)."""

    until: float
    row: int  # longest row, tokens
    step_tokens: int  # padded tokens per optimiser step
    code: float  # share of the step's tokens that is library source
    long: float  # share of the step's tokens that is long-context tasks
    copies: float  # share of the short exchanges that is plain copying, which teaches looking back early
    stride: int = 1  # every how-manieth layer is trained: 2 is half the depth at half the cost
    short: int = 128  # size of short tasks, tokens
    embedding: float = 1.0  # factor on the embedding's learning rate: high at first, when every row must move


CURRICULUM = (
    Stage(0.13, 256, 2048, code=0.25, long=0.10, copies=0.5, stride=2, short=64),
    Stage(0.26, 256, 2048, code=0.30, long=0.20, copies=0.2, stride=2),
    Stage(0.65, 384, 3072, code=0.30, long=0.20, copies=0.15, embedding=0.35),
    Stage(0.90, 1024, 4096, code=0.30, long=0.20, copies=0.10, embedding=0.35),
    Stage(1.00, 2048, 6144, code=0.30, long=0.25, copies=0.10, embedding=0.35),
)

Piece = tuple[list[int], bool]  # token ids, and whether they are learned
Micro = tuple[Tensor, Tensor]  # ids and targets, int64 [rows, length]


class Mixture:
    """Batches of library source and generated tasks over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.pad, self.end = special_id(tokenizer, PAD), special_id(tokenizer, END_OF_TEXT)
        encoded = tokenizer.encode_batch(list(texts))
        ids = [np.asarray([*item.ids, self.end], dtype=np.int16) for item in encoded]
        order = Random(f"{seed} files").sample(range(len(ids)), len(ids))
        self.stream = np.concatenate([ids[index] for index in order])

    def step(self, step: int, stage: Stage) -> tuple[list[Micro], list[Micro]]:
        """The step's source batches and task batches."""
        rng = Random(f"{self.seed} step {step}")
        source = [self._source(rng, stage.row, max(1, round(stage.step_tokens * stage.code / stage.row)))]
        long = self._conversations(rng, stage, long=True)
        short = self._conversations(rng, stage, long=False)
        return source, [pad_rows(group, self.pad) for group in (long, *_alike(short)) if group]

    def _source(self, rng: Random, row: int, rows: int) -> Micro:
        starts = [rng.randrange(len(self.stream) - row - 1) for _ in range(rows)]
        taken = np.stack([self.stream[start : start + row + 1] for start in starts]).astype(np.int64)
        block = torch.from_numpy(taken)  # [rows, row + 1]
        return block[:, :-1], block[:, 1:]

    def _conversations(self, rng: Random, stage: Stage, long: bool) -> list[list[Piece]]:
        share = stage.long if long else 1 - stage.code - stage.long
        budget, rows = round(stage.step_tokens * share), []
        while budget > 0:
            row = self.long_row(rng, stage.row) if long else self.short_row(rng, stage)
            length = sum(len(ids) for ids, _ in row)
            if length <= stage.row + 1:
                rows.append(row)
                budget -= length
        return sorted(rows, key=lambda row: sum(len(ids) for ids, _ in row))

    def long_row(self, rng: Random, row: int) -> list[Piece]:
        """A long-context task with several questions, of any length up to the row."""
        task = rng.choices(list(LONG_TASKS), list(LONG_TASKS.values()))[0]
        low = 64 if rng.random() < 0.5 else row // 2
        return self.chat(turns(task, rng, rng.randint(low, row) - 80, evaluation=False), None)

    def short_row(self, rng: Random, stage: Stage) -> list[Piece]:
        """One to three short exchanges, now and then under a system prompt."""
        conversation: list[Turn] = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            others = rng.choices(list(SHORT_TASKS), list(SHORT_TASKS.values()))[0]
            task, size = "copy" if rng.random() < stage.copies else others, rng.randint(stage.short // 4, stage.short)
            conversation += [talk(rng)] if task == "talk" else turns(task, rng, size, False)
        return self.chat(conversation, rng.choice(SYSTEM) if rng.random() < 0.12 else None)

    def chat(self, conversation: Sequence[Turn], system: str | None) -> list[Piece]:
        """Token pieces of a conversation in the chat template; only replies and their ends are learned."""
        pieces: list[Piece] = []
        opening = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        for turn in conversation:
            question = f"{opening}<|im_start|>user\n{turn.prompt}<|im_end|>\n<|im_start|>assistant\n"
            pieces += [(self.tokenizer.encode(question).ids, False),
                       (self.tokenizer.encode(turn.answer + TURN_END).ids, True)]  # fmt: skip
            opening = "\n"
        return pieces


def _alike(rows: list[list[Piece]]) -> list[list[list[Piece]]]:
    """Sorted rows in three batches of like lengths, the longest rows in the smallest batch, to pad less."""
    first, second = len(rows) // 2, len(rows) * 5 // 6
    return [rows[:first], rows[first:second], rows[second:]]


def pad_rows(rows: Sequence[Sequence[Piece]], pad: int) -> Micro:
    """Ids and next-token targets of rows padded on the right to the longest."""
    longest = max(sum(len(ids) for ids, _ in row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    targets = torch.full((len(rows), longest), NO_LOSS)
    for index, row in enumerate(rows):
        flat = [token for piece, _ in row for token in piece]
        learned = [token if learn else NO_LOSS for piece, learn in row for token in piece]
        ids[index, : len(flat)] = torch.tensor(flat)
        targets[index, : len(flat) - 1] = torch.tensor(learned[1:])
    return ids, targets
