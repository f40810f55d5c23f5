"""Contenders that must lose: as good as the method in everything but the idea. No catalogue lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.kv.format import BlockCut, KVShape, Raw, RowFormat
from phasewise.kv.wire import Wire
from phasewise.methods.attend.zero_tuning import Tuned, ZeroTuning
from phasewise.methods.draft.swift import SelfDrafter, Swift
from phasewise.methods.evict._allot import UNIFORM, Spread, allot
from phasewise.methods.evict._noise import gumbel
from phasewise.methods.evict._running import Running
from phasewise.methods.evict.h2o import H2O
from phasewise.methods.evict.keyformer import Keyformer
from phasewise.methods.evict.tova import Tova
from phasewise.methods.evict.zipvl import Zipped, ZipVL
from phasewise.methods.skip.lazyllm import Lazy, LazyLLM
from phasewise.methods.store._approximated import Approximated
from phasewise.methods.store._cachegen.chunked import Chunked, ChunkPlan
from phasewise.methods.store._grouped import Grouped
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.plan import EVERYTHING, AttentionPlan
from phasewise.step.probe import Shaped
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.evict import Evict
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.schedule import Work
from phasewise.verbs.skip import Skip
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits


def drawn(*about: object) -> torch.Generator:
    """Random numbers that depend on what they are about, and on nothing else."""
    return torch.Generator().manual_seed(Random(repr(about)).getrandbits(60))


@dataclass(frozen=True)
class Control(Method):
    """The class attributes that the builder asks of every method."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}


@dataclass(frozen=True)
class OneChunk(Control):
    """schedule: all decodes, and the next chunk of the oldest prompt alone, however small it is."""

    budget: int
    traits: ClassVar[Traits] = Traits("schedule")

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        works = [Work(job, job.rows) for job in live if not job.prefilling]
        left = self.budget - sum(work.rows for work in works)
        first = next((job for job in live if job.prefilling), None)
        return works + ([Work(first, min(first.rows, left))] if first is not None and left > 0 else [])


@dataclass(frozen=True)
class Blindly(Control):
    """draft: SWIFT without its search: as many sub-layers are left out, whichever they are."""

    of: Swift

    @property
    def traits(self) -> Traits:
        return self.of.traits

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
    traits: ClassVar[Traits] = Traits("schedule")

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
    per head; layers and heads keep as many as `spread` says."""

    keep: float
    window: int
    seed: int = 0
    spread: Spread = UNIFORM
    traits: ClassVar[Traits] = Traits("evict", frees_rows=True)

    def bind(self, host: Host) -> _RandomRows:
        return _RandomRows(self, host.model.config.layers)


class _RandomRows(Evict):
    def __init__(self, knobs: RandomRows, layers: int) -> None:
        self.knobs, self.layers = knobs, layers

    def plan(self, span: Span) -> AttentionPlan:
        return EVERYTHING

    def due(self, request: Request) -> bool:
        return not request.prefilling and "random_rows" not in request.state

    def keep(self, request: Request, layer: int) -> Tensor | list[Tensor] | None:
        assert request.kv is not None
        if layer == len(request.kv.layers) - 1:
            request.state["random_rows"] = True
        part = request.kv.layers[layer].read()[0]
        heads, older = part.size[0], part.n - self.knobs.window
        stay = max(int(self.knobs.keep * request.prompt_len), self.knobs.window) - self.knobs.window
        scores = torch.rand(heads, max(older, 0), generator=drawn(self.knobs.seed, request.tokens, layer))
        if stay >= older:
            return None
        rows = self.knobs.spread.of(stay, older, layer, self.layers)
        return allot(scores, rows, part.n - older, self.knobs.spread)


@dataclass(frozen=True)
class RandomRunning(Control):
    """evict: as many rows stay as with another method that scores rows as it goes, and as many recent ones, the others
    drawn at random: of the prompt's, and of those that come after one leaves for each."""

    of: H2O | Tova | Keyformer
    seed: int = 0

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> _RandomRunning:
        return _RandomRunning(self.of.bind(host), self.seed)


class _RandomRunning(Running):
    """Every row has a number of its own, which ranks it for good."""

    def __init__(self, of: Running, seed: int) -> None:
        way = replace(of.way, name="random_running", sums=False, mean=False, shaped=Shaped(self._drawn))
        super().__init__(way, of.config, of.budget)
        self.seed = seed

    def _drawn(self, read: Read, found: Tensor, rows: Sequence[int]) -> Tensor:
        alike = torch.zeros(found.shape[2], dtype=torch.int64)
        heads = torch.arange(1 if self.way.together else found.shape[0]) if read.part.heads is None else read.part.heads
        drawn = gumbel(alike + self.seed, alike, read.part.positions[:, : found.shape[-1]], heads, 1, read.layer)
        return drawn.expand_as(found)


@dataclass(frozen=True)
class RandomImportant(Control):
    """evict, attend: as many tokens per layer as ZipVL finds important, its last ones among them, the others drawn at
    random."""

    of: ZipVL

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> _RandomImportant:
        return _RandomImportant(self.of, host.model.config.attention)


class _RandomImportant(Zipped):
    def ranked(self, normalised: Tensor, read: Read) -> Tensor:
        return torch.rand(len(normalised), generator=drawn(read.span.request.prompt[-8:], len(normalised), read.layer))


@dataclass(frozen=True)
class RandomNeeds(Control):
    """skip, evict, attend: after the same layers as many tokens go on, and as many come back, as LazyLLM needs: any."""

    of: LazyLLM

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> _RandomNeeds:
        return _RandomNeeds(self.of, host.model.config, host.model.dtype)


class _RandomNeeds(Lazy):
    def scores(self, read: Read) -> Tensor:
        about = (read.span.request.prompt[-8:], read.span.positions[-1], read.layer)
        return torch.rand(read.part.size[1], generator=drawn(*about))


@dataclass(frozen=True)
class OtherWay(Control):
    """attend: ZeroTuning with every factor turned over: what was raised is lowered, in the same heads."""

    traits: ClassVar[Traits] = Traits("attend", own_attention=True)

    def bind(self, host: Host) -> Any:
        made = ZeroTuning().bind(host)
        return Tuned(-made.lift) if isinstance(made, Tuned) else made


@dataclass(frozen=True)
class RandomGuess(Control, Drafter):
    """draft: a chain of `k` tokens drawn at random from a vocabulary of `vocab`."""

    k: int
    vocab: int
    guarantee: ClassVar[str] = "exact"
    traits: ClassVar[Traits] = Traits("draft")

    def size(self, request: Request) -> int:
        return min(self.k, headroom(request))

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        chains = (Random(f"{r.prompt_len} {r.tokens[-2:]} {r.known}") for r in requests)
        return [Draft.chain([rng.randrange(self.vocab) for _ in range(b)]) for rng, b in zip(chains, budgets)]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class Coarse(Control, Storing):
    """store: CacheGen's way over the wire, with so many steps on either side of zero for every number of all layers."""

    steps: int
    traits: ClassVar[Traits] = Traits("store")

    def format(self) -> RowFormat:
        return Raw()

    def wire(self, shapes: Sequence[KVShape], unit: int) -> Wire:
        return _Coarse(self.steps, shapes)


class _Coarse(Chunked):
    def __init__(self, steps: int, shapes: Sequence[KVShape]) -> None:
        self.alike = steps
        super().__init__(ChunkPlan(2, 256, 1, 2.0), shapes)

    def _steps(self, level: int, layer: int) -> tuple[int, int]:
        return self.alike, self.alike


@dataclass(frozen=True)
class Swapped(Control, Storing):
    """store: KIVI's bits with the axes swapped: keys by token, values by channel."""

    bits: int
    group: int
    residual: int
    traits: ClassVar[Traits] = Traits("store", packs_blocks=True)

    def format(self) -> RowFormat:
        return Grouped(self.bits, self.group, (BlockCut(1, self.residual), BlockCut(self.residual)), (False, True))


@dataclass(frozen=True)
class Elsewhere(Control, Storing):
    """store: GEAR, but every head's product is that of the head before it."""

    bits: int
    group: int
    block: int
    rank: int
    sparse: float
    traits: ClassVar[Traits] = Traits("store", packs_blocks=True)

    def format(self) -> RowFormat:
        cut = BlockCut(self.block)
        return _Elsewhere(self.bits, self.group, (cut, cut), rank=self.rank, sparse=self.sparse)


class _Elsewhere(Approximated):
    def seal(self, side: int, x: Tensor) -> Sequence[Tensor]:
        left, right, *rest = super().seal(side, x)
        return [left.roll(1, 0), right.roll(1, 0), *rest]


@dataclass(frozen=True)
class OtherLayers(Control):
    """skip: as many layers as Unified Layer Skipping leaves out, but the first ones after the first."""

    speedup: float
    traits: ClassVar[Traits] = Traits("skip", phases=("decode",))

    def bind(self, host: Host) -> _OtherLayers:
        layers = host.model.config.layers
        kept = min(layers, max(2, int(layers / self.speedup)))
        return _OtherLayers(range(1, 1 + layers - kept))


class _OtherLayers(Skip):
    def __init__(self, skipped: range) -> None:
        self.skipped, self.nobody = skipped, torch.empty(0, dtype=torch.int64)

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        return self.nobody if layer in self.skipped else None

    def unused(self, layers: int) -> Sequence[int]:
        return list(self.skipped)
