"""Trees whose siblings are drawn without replacement (Recursive Speculative Decoding, arXiv 2402.14160)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.speculation.branching import branch, without
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest, TreeDrafter, TreeShape, tree_drafter
from phasewise.verbs.draft import Draft, Drawn
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Purpose, uniform
from phasewise.verbs.traits import Traits

DRAWN: Drawn = "without_replacement"


@dataclass(frozen=True)
class RSD(Method):
    """A draft model's tree of `depth` levels. `beam` > 0 (RSD-S): the `beam` sequences of every level that a stochastic
    beam search draws without replacement; unlikely beginnings die early. Else (RSD-C) every node of level i has
    `widths[i]` children, written 4x2x2x1.

    Siblings stay in the order they were drawn in, which `rejection` needs. Guesses for greedy requests are the
    likeliest instead. Left out: choosing the shape by what was accepted.
    """

    model: str = "pocket-draft"
    beam: int = 6
    depth: int = 4
    widths: str = "4x2x2x1"
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2402.14160"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob, least in (("beam", 0), ("depth", 1), ("chunk", 1)):
            if getattr(self, knob) < least:
                raise UserError(f"rsd: {knob}={getattr(self, knob)} must be at least {least}")
        if not all(part.isdecimal() and int(part) > 0 for part in self.widths.split("x")):
            raise UserError(f"rsd: widths={self.widths!r} must be numbers of children from 1 on, such as 4x2x2x1")

    @property
    def shape(self) -> TreeShape:
        if self.beam:
            return _Beam(self.beam, self.depth)
        return _Widths(tuple(map(int, self.widths.split("x"))))

    @property
    def traits(self) -> Traits:
        return Traits("draft", max_nodes=self.shape.nodes(self.shape.levels))

    def bind(self, host: Host) -> TreeDrafter:
        return tree_drafter(host, "rsd", self.model, self.shape, self.chunk)


@dataclass(frozen=True)
class _Widths:
    """The number of children of every node, level by level."""

    widths: tuple[int, ...]
    drawn: Drawn = DRAWN

    @property
    def levels(self) -> int:
        return len(self.widths)

    def nodes(self, levels: int) -> int:
        return sum(math.prod(self.widths[: level + 1]) for level in range(levels))

    def runs(self, levels: int) -> int:
        return self.nodes(levels)

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        width, added = self.widths[len(tree.draft.path(asked[0].node))], list[int]()
        for node, q in asked:
            if not tree.left:
                break
            tokens, rows = branch(
                q, min(width, tree.left), "point" if tree.point else DRAWN, tree.us(node), tree.coupling
            )
            added += [tree.add(node, token, None if rows is None else rows[i]) for i, token in enumerate(tokens)]
        return added if tree.left else []

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish(DRAWN)


@dataclass(frozen=True)
class _Beam:
    """Stochastic beam search (arXiv 1903.06059): the largest perturbed log-probabilities of a level, each conditioned
    on its parent's. What survives hangs on them alone, and given earlier siblings on no later one's token."""

    width: int
    levels: int
    drawn: Drawn = DRAWN

    def nodes(self, levels: int) -> int:
        return self.width * levels

    def runs(self, levels: int) -> int:
        return self.nodes(levels)

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        notes = tree.notes or {-1: (0.0, 0.0)}  # of each node: log-probability of its path, perturbed
        found: list[tuple[float, float, int, int]] = []  # of a child: perturbed, log-probability, parent's place, token
        for place, (node, q) in enumerate(asked):
            path, score = notes[node]
            paths = path + q.double().log()
            scores = paths if tree.point else conditioned(paths + self._noise(tree, node, place, q), score)
            best = scores.topk(min(self.width, len(q)))
            found += [
                (value, float(paths[token]), place, token)
                for value, token in zip(best.values.tolist(), best.indices.tolist())
                if value > -math.inf
            ]
        found.sort(key=lambda child: -child[0])
        rest: dict[int, Tensor | None] = {place: each.q for place, each in enumerate(asked)}
        added: list[int] = []
        for value, path, place, token in found[: min(self.width, tree.left)]:
            left = rest[place]
            if left is None:  # all of its weight is drawn: what is found there is rounding
                continue
            added.append(tree.add(asked[place].node, token, None if tree.point else left))
            tree.notes[added[-1]] = (path, value)
            if not tree.point:
                rest[place] = without(left, [token])
        return added if tree.left else []

    def _noise(self, tree: DraftBuilder, node: int, place: int, q: Tensor) -> Tensor:
        """Gumbel numbers, float64 and otherwise like q [V], that hang on the request and the node alone."""
        request = tree.request
        word = uniform(request.params.seed, request.known + len(tree.draft.path(node)), Purpose.DRAFT, place)
        made = torch.Generator().manual_seed(int(word * 2**53))
        noise = -(-torch.rand(len(q), generator=made, dtype=torch.float64).clamp_min(1e-300).log()).log()
        return noise.to(q.device)  # drawn on the processor: on every device the same

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish(DRAWN)


def conditioned(scores: Tensor, largest: float) -> Tensor:
    """Gumbel scores float64 [n] as they are given that the largest of them is `largest`."""
    top = scores.max()
    v = largest - scores + torch.log1p(-torch.exp(scores - top))  # -inf at the largest itself
    return largest - v.clamp_min(0) - torch.log1p(torch.exp(-v.abs()))
