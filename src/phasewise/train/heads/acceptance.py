"""How far heads guess right, over held-out text that the model wrote greedily, without an engine.

A guess of a fixed tree is accepted where the model would have said it itself. So the ranks that heads give to a text's
tokens say all: how often a depth is right where those before it were, which tree to make, and what it would accept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phasewise.speculation.heads.last_state import RANKS, RankPath, rank_tree
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.kinds import HeadsKind
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from phasewise.train.written import WrittenText

SIZES = (15, 63)  # nodes of the trees that are tried out
BEYOND = 1 << 30  # the rank of a token that lies behind the text's end: never right

Ranks = list[list[int]]
"""Of one text: for each position at which a draft could be made, the rank that each head gives to the right token."""


@dataclass(frozen=True)
class Acceptance:
    """`conditional[i]`: how often the first guess of head i is right where those before it were. `accepted`: tokens
    that a pass would give, with a chain of all heads and with trees. Over `tokens` of text."""

    tokens: int
    conditional: tuple[float, ...]
    accepted: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "conditional": [round(x, 4) for x in self.conditional],
                "accepted": {name: round(x, 3) for name, x in self.accepted.items()}}  # fmt: skip

    def __str__(self) -> str:
        depths = ", ".join(f"{x:.1%}" for x in self.conditional)
        passes = ", ".join(f"{x:.2f} with {name}" for name, x in self.accepted.items())
        return f"right at depth 1, 2 ... where the depths before were: {depths}; tokens a pass: {passes}"


@torch.no_grad()
def ranks(
    kind: HeadsKind, module: nn.Module, target: FrozenTarget, texts: Sequence[WrittenText], pad: int
) -> list[Ranks]:
    """The ranks of each text, from the state of its prompt's last token on; 0 is the likeliest token."""
    found = []
    for text in texts:
        block = pad_rows([[(text.prompt, False), (text.reply, True)]], pad)
        seen = target.see(TokenBlock(*(each.to(target.output.device) for each in block)), kind.taps(module))
        first, count = len(text.prompt) - 1, len(text.reply) - 1
        columns: list[list[int]] = []
        for head, logits in enumerate(kind.guesses(module, target, seen)):
            right = logits.gather(1, seen.tokens(head)[:, None])
            own = (logits > right).sum(1).tolist()
            places = seen.wanted(head)[0].nonzero()[:, 0].tolist()
            by_place = dict(zip(places, own))
            columns.append([by_place.get(first + at, BEYOND) for at in range(count)])
        found.append([list(row) for row in zip(*columns)])
    return found


def accuracy(found: Iterable[Ranks], depth: int) -> list[list[float]]:
    """How often each rank of each head is right, among the positions at which the heads before it had the right token
    among their `RANKS` likeliest: [depth][RANKS]. Never 0, so that every path has a weight."""
    counts, reached = torch.ones(depth, RANKS) * 1e-3, torch.ones(depth)
    for text in found:
        for row in text:
            for head, rank in enumerate(row):
                if rank == BEYOND:
                    break
                reached[head] += 1
                if rank >= RANKS:
                    break
                counts[head, rank] += 1
    table: Tensor = counts / reached[:, None]
    return [[round(x, 5) for x in row] for row in table.tolist()]


def measure(found: Sequence[Ranks], table: Sequence[Sequence[float]]) -> Acceptance:
    """What the heads accept, with trees made of `table`."""
    depth = len(table)
    trees: dict[str, set[RankPath]] = {f"a chain of {depth}": {(0,) * (i + 1) for i in range(depth)}}
    trees |= {f"a tree of {nodes}": set(rank_tree(table, nodes)) for nodes in SIZES}
    rows = [row for text in found for row in text]
    accepted = {name: tokens_a_pass(found, tree) for name, tree in trees.items()}
    return Acceptance(len(rows), tuple(conditional(rows, depth)), accepted)


def conditional(rows: Sequence[Sequence[int]], depth: int) -> list[float]:
    """For each depth, the share of first guesses that are right where all before it were, ends of texts left out."""
    shares = []
    for head in range(depth):
        reached = [row[head] for row in rows if row[head] != BEYOND and not any(row[:head])]
        shares.append(sum(rank == 0 for rank in reached) / max(1, len(reached)))
    return shares


def tokens_a_pass(found: Sequence[Ranks], tree: set[RankPath]) -> float:
    """A walk over the texts as speculative decoding takes it: each pass accepts the longest path of right tokens and
    gives one more. The last pass of a text, which its end cuts, is left out."""
    tokens = passes = 0
    for text in found:
        at = 0
        while at < len(text):
            row, taken = text[at], 0
            while taken < len(row) and tuple(row[: taken + 1]) in tree:
                taken += 1
            if taken < len(row) and row[taken] == BEYOND:
                break
            tokens, passes, at = tokens + taken + 1, passes + 1, at + taken + 1
    return tokens / max(1, passes)
