"""All heads of a layer vote on which rows it reads, each as much as its softmax says (TokenSelect, arXiv 2411.02886).

Promises exact attention over the first rows, the last ones and `k` others per query row, the same for all heads of a
layer; the cache stays whole, so a later query may read any row. Prompts are dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import KVShape
from phasewise.methods.attend._select import elect, grouped, tally
from phasewise.model.model import Model
from phasewise.ops.native.choice import SHARE, Candidates
from phasewise.step.choice import VectorChoice
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.host import Host

SOME = 256  # positions whose angles are worked out together


@dataclass(frozen=True)
class TokenSelect:
    """A row reads the first `first` rows, the last `local` ones, itself included, and of those between the `k` that get
    most votes: the softmax of every query head over the rows between, summed over all heads. For the vote, keys are as
    they were before rotation and the query stands `local` positions behind all of them, so that distance says nothing.

    The first `dense_layers` layers read everything: not the paper's, but in the very first one equal tokens have equal
    keys before rotation, and what no vote can tell apart would be left to rounding.

    Keys as they were cost half as much as the KV itself, beside it and within its budget, and all of them are read for
    every choice: it saves values and their share of the arithmetic. Where heads keep different rows, each KV head votes
    for itself. Left out: lists that are used again while queries are alike (every row
    chooses anew, as with a threshold above 1: which draft will stay is not known while its rows choose), prompts in
    chunks that choose by their mean query, and positions counted within the list, so texts end with the model's
    context.
    """

    k: int = 256
    first: int = 16
    local: int = 64
    dense_layers: int = 1

    paper: ClassVar[str] = "arXiv 2411.02886"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"k": 1 << 30}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"k": 96, "first": 8, "local": 24})
    tight: ClassVar[dict[str, object]] = {"k": 6, "first": 2, "local": 4}
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("first", 0), ("local", 1), ("dense_layers", 0)):
            if getattr(self, name) < least:
                raise UserError(f"token_select: {name}={getattr(self, name)} must be at least {least}")

    def bind(self, host: Host) -> _TokenSelect:
        return _TokenSelect(self, host.model)


class _TokenSelect:
    name = "token_select"

    def __init__(self, knobs: TokenSelect, model: Model) -> None:
        self.knobs, self.most, self.model = knobs, knobs.first + knobs.k + knobs.local, model
        self.choice = VectorChoice(
            (self.name, 0), self._candidates, self.most + 1, lambda rows: rows, knobs.dense_layers, scaled=False,
            make=self._make, turned=Turning(model, knobs.local),
        )  # fmt: skip

    def _candidates(self, n: int) -> Candidates:
        first, own = self.knobs.first, n - self.knobs.local
        return Candidates(first, own - first, 1, self.knobs.k, SHARE, True, first, own, at=first)

    def beside(self, layer: int, shape: KVShape, end: int) -> int:
        if layer < self.knobs.dense_layers or end <= self.most:
            return 0
        return end * shape.heads * shape.dim * shape.dtype.itemsize

    def looks(self, span: Span) -> bool:
        return self.choice.acts(span)

    def __call__(self, reads: Sequence[Read]) -> list[Tensor | None]:
        return elect(reads, self, self.knobs.first, self.knobs.local, self.most, self.knobs.dense_layers)

    # ---- how rows are ranked
    def width(self, dim: int) -> int:
        return dim

    def stand(self, read: Read, start: int, stop: int) -> Tensor:
        """Keys as they were before rotation."""
        part = read.part
        at = part.positions[:, start:stop]
        return self.model.rotate(read.layer, part.keys(start, stop), -at)

    def _make(self, layer: int, keys: Tensor, start: int) -> Tensor:
        """The same for rows in slots of their positions."""
        return self.model.rotate(layer, keys, -torch.arange(start, start + keys.shape[1], device=keys.device))

    def votes(self, read: Read, stands: Tensor, among: Tensor | None) -> Tensor:
        """Of all heads together, [1, R, N], or by KV head where these do not see the same rows."""
        turned = self.model.rotate(read.layer, read.q, (self.knobs.local - read.q_positions)[:, None])
        logits = grouped(turned, len(stands)) @ stands.float().mT[:, None]  # [h, G, R, N]
        if among is not None and len(among) > 1:
            return tally(logits, among)
        return tally(logits.flatten(0, 1)[None], among)


class Turning:
    """What moves queries from their positions to `to`, for kernels; worked out for some positions at a time."""

    def __init__(self, model: Model, to: int) -> None:
        self.model, self.to = model, to
        self._known: dict[tuple[int | None, int], Tensor | None] = {}

    def __call__(self, layer: int, position: int) -> Tensor | None:
        kind, first = self.model.config.rope_of[layer], position // SOME * SOME
        if (kind, first) not in self._known:
            at = torch.arange(first, first + SOME, device=self.model.device)
            self._known[kind, first] = self.model.turning(layer, self.to - at)
        found = self._known[kind, first]
        return None if found is None else found[position - first]
