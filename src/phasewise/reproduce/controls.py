"""Contenders that must lose: as good as the method in everything but the idea. No catalogue lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.kv.buffer import KVShape, Raw
from phasewise.kv.chunked import Chunked, Cut
from phasewise.kv.wire import Wire
from phasewise.methods.draft.swift import SelfDrafter, Swift
from phasewise.methods.evict.zipvl import Zipped, ZipVL
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.read import Read, View
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, headroom
from phasewise.verbs.evict import retain
from phasewise.verbs.host import Host
from phasewise.verbs.schedule import Work
from phasewise.verbs.store import Codec


def drawn(*about: object) -> torch.Generator:
    """Random numbers that depend on what they are about, and on nothing else."""
    return torch.Generator().manual_seed(Random(repr(about)).getrandbits(60))


@dataclass(frozen=True)
class Control:
    """What the builder asks of every method."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}


@dataclass(frozen=True)
class OneChunk(Control):
    """schedule: all decodes, and the next chunk of the oldest prompt alone, however small it is."""

    budget: int

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        works = [Work(job, job.rows) for job in live if not job.prefilling]
        left = self.budget - sum(work.rows for work in works)
        first = next((job for job in live if job.prefilling), None)
        return works + ([Work(first, min(first.rows, left))] if first is not None and left > 0 else [])


@dataclass(frozen=True)
class Blindly(Control):
    """draft: SWIFT without its search: as many sub-layers are left out, whichever they are."""

    of: Swift

    def bind(self, host: Host) -> SelfDrafter:
        made = self.of.bind(host)
        sites = Random(0).sample(range(2 * made.search.inner), made.search.count)
        made.take(frozenset(sites))
        return made


@dataclass(frozen=True)
class CutTwice(Control):
    """schedule: layer groups of chunks: a prompt is cut into `rows`, and each piece crosses the model in `groups`.

    As many steps as layered prefill takes, but the same layers are visited by piece after piece.
    """

    rows: int
    groups: int

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        works = [Work(job, job.rows) for job in live if not job.prefilling and not job.depth]
        job = next((job for job in live if job.depth), None) or next((job for job in live if job.prefilling), None)
        if job is None:
            return works
        ends = [job.layers * g // self.groups for g in range(1, self.groups + 1)]
        layers = (job.depth, next(end for end in ends if end > job.depth))
        return [*works, Work(job, job.rows if job.depth else min(job.rows, self.rows), layers)]


@dataclass(frozen=True)
class RandomRows(Control):
    """evict: of every prompt a share `keep` stays, as with SnapKV its last `window` rows and others, drawn at random
    per head."""

    keep: float
    window: int
    seed: int = 0

    def bind(self, host: Host) -> _RandomRows:
        return _RandomRows(self)


class _RandomRows:
    observes = 0

    def __init__(self, knobs: RandomRows) -> None:
        self.knobs = knobs

    def observe(self, read: Read) -> None:
        """Looks at nothing."""

    def view(self, read: Read) -> View | None:
        return None

    def due(self, request: Request) -> bool:
        return not request.prefilling and "random_rows" not in request.state

    def keep(self, request: Request, layer: int) -> Tensor | None:
        assert request.kv is not None
        if layer == len(request.kv.layers) - 1:
            request.state["random_rows"] = True
        part = request.kv.layers[layer].read()[0]
        heads, older = part.size[0], part.n - self.knobs.window
        stay = max(int(self.knobs.keep * request.prompt_len), self.knobs.window) - self.knobs.window
        scores = torch.rand(heads, max(older, 0), generator=drawn(self.knobs.seed, request.tokens, layer))
        return None if stay >= older else retain(scores, stay, part.n - older)


@dataclass(frozen=True)
class RandomTokens(Control):
    """evict, attend: as many tokens per layer as ZipVL finds important, its last ones among them, the others drawn at
    random."""

    of: ZipVL
    slots: ClassVar[tuple[str, ...]] = ZipVL.slots
    phases: ClassVar[tuple[str, ...]] = ZipVL.phases
    shares_prefix: ClassVar[bool] = False

    def bind(self, host: Host) -> _RandomTokens:
        return _RandomTokens(self.of, host.model.config.attention)


class _RandomTokens(Zipped):
    def ranked(self, normalised: Tensor, read: Read) -> Tensor:
        return torch.rand(len(normalised), generator=drawn(read.span.request.prompt[-8:], len(normalised), read.layer))


@dataclass(frozen=True)
class RandomPages(Control):
    """attend: as many pages as Quest reads, its own among them, the others drawn at random per head."""

    page: int
    budget: int
    dense_layers: int
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self._one(read) for read in reads]

    def _one(self, read: Read) -> Tensor:
        part, most = read.part, max(self.budget, 3 * self.page)
        heads, n = part.size
        if read.layer < self.dense_layers or n <= most:
            return read.attend()
        assert part.plain and part.n == read.span.positions[0] and read.mask() is None, "made for plain decoding"
        own = part.n // self.page * self.page
        gen = drawn(read.span.request.prompt_len, part.n, read.layer)
        pages = torch.rand(heads, own // self.page, generator=gen).topk((most - n + own) // self.page).indices
        old = (pages[:, :, None] * self.page + torch.arange(self.page)).flatten(1)
        return read.attend_rows(torch.cat((old, torch.arange(own, n).expand(heads, -1)), 1))


@dataclass(frozen=True)
class RandomGuess(Control):
    """draft: a chain of `k` tokens drawn at random from a vocabulary of `vocab`."""

    k: int
    vocab: int
    guarantee: ClassVar[str] = "exact"

    def size(self, request: Request) -> int:
        return min(self.k, headroom(request))

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        chains = (Random(f"{r.prompt_len} {r.tokens[-2:]} {r.known}") for r in requests)
        return [Draft.chain([rng.randrange(self.vocab) for _ in range(b)]) for rng, b in zip(chains, budgets)]

    def learn(self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome]) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class Coarse(Control):
    """store: CacheGen's way over the wire, with so many steps on either side of zero for every number of all layers."""

    steps: int

    def codec(self) -> Codec:
        return Raw()

    def wire(self, shapes: Sequence[KVShape], unit: int) -> Wire:
        return _Coarse(self.steps, shapes)


class _Coarse(Chunked):
    def __init__(self, steps: int, shapes: Sequence[KVShape]) -> None:
        self.alike = steps
        super().__init__(Cut(2, 256, 1, 2.0), shapes)

    def _steps(self, level: int, layer: int) -> tuple[int, int]:
        return self.alike, self.alike


@dataclass(frozen=True)
class OtherLayers(Control):
    """skip: as many layers as Unified Layer Skipping leaves out, but the first ones after the first."""

    speedup: float
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def bind(self, host: Host) -> _OtherLayers:
        layers = host.model.config.layers
        kept = min(layers, max(2, int(layers / self.speedup)))
        return _OtherLayers(range(1, 1 + layers - kept))


class _OtherLayers:
    def __init__(self, skipped: range) -> None:
        self.skipped, self.nobody = skipped, torch.empty(0, dtype=torch.int64)

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        return self.nobody if layer in self.skipped else None

    def unused(self, layers: int) -> Sequence[int]:
        return list(self.skipped)
