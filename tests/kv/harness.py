"""Methods at work without an engine: feed rows, look at logits and cache. And a drafter that follows a script."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.builder import Builder
from phasewise.engine.assembly import kv_shapes
from phasewise.engine.limits import Limits
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.format import Raw, RowFormat
from phasewise.kv.store import Store
from phasewise.methods.attend.dense import Dense
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.match import Match
from phasewise.model.model import Model
from phasewise.ops import attention as ops
from phasewise.options import parse
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.plan import EVERYTHING, AttentionPlan, Custom, Record
from phasewise.step.read import Read, View
from phasewise.step.span import Span, ancestors, depths
from phasewise.verbs.attend import Attend
from phasewise.verbs.draft import Draft, Drafter
from phasewise.verbs.evict import Evict
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.traits import Traits
from tests import tiny


class Walk:
    """One request fed by hand: each `feed` is a step of an engine, eviction included."""

    def __init__(self, model: Model, prompt: Sequence[int], *, evict: Any = None, attend: Any = None, skip: Any = None,
                 format: RowFormat | None = None) -> None:  # fmt: skip
        self.model, self.counters, self.ledger = model, Counters(), Ledger(1 << 40)
        self.phase = Phase("test", decode=None, attend=attend or Dense(), evict=evict, skip=skip)  # type: ignore[arg-type]
        self.plain = replace(self.phase, attend=Dense(), skip=None)  # prompts
        self.request = Request(prompt, Params(max_tokens=1 << 20))
        store = Store(kv_shapes(model), format or Raw(), ledger=self.ledger, counters=self.counters)
        if evict is not None:
            store.expect([evict.places], store.level)
        self.kv: KV = store.open(self.request, len(prompt))
        self.request.kv = self.kv

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Compute and commit the next rows as one span. -> logits [rows, V]."""
        logits = self.try_(tokens)
        self.commit(tokens, len(tokens))
        return logits

    @torch.inference_mode()
    def try_(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
        """Compute rows without committing them; with `parents`, a tree. -> logits [rows, V]."""
        span = self.begin(tokens, parents)
        return self.model.head(forward(self.model, [span], self.counters).x)

    def begin(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Span:
        """The next rows as a span, for a forward that the caller runs, perhaps with spans of others."""
        start = self.request.computed
        positions: Sequence[int] = range(start, start + len(tokens))
        sees = None
        if parents is not None:
            positions, sees = [start + depth for depth in depths(parents)], ancestors(parents)
        phase = self.plain if self.request.prefilling else self.phase
        self.kv.reserve(len(tokens))
        self.span = Span(self.request, self.kv, phase, list(tokens), positions, sees)
        return self.span

    @torch.inference_mode()
    def commit(self, tokens: Sequence[int], keep: int | list[int]) -> None:
        """Keep the first rows, or a path, of what was tried; then evict."""
        rows = list(range(keep)) if isinstance(keep, int) else keep
        self.kv.commit(keep)
        self.span.phase.tell(self.span, keep)
        request = self.request
        for row in rows:
            if request.computed == request.known:
                request.tokens.append(tokens[row])
            assert request.tokens[request.computed] == tokens[row]
            request.computed += 1
        evict: Evict | None = self.phase.evict
        if evict is not None and evict.due(request):
            for layer in range(len(self.kv.layers)):
                index = evict.keep(request, layer)
                if index is not None:
                    self.kv.keep(layer, index)
        if not request.prefilling:
            self.kv.settle(self.phase.marks(request))

    @torch.inference_mode()
    def fork(self) -> Walk:
        twin = object.__new__(Walk)
        twin.__dict__.update(self.__dict__)
        twin.request = Request(self.request.prompt)
        twin.request.adopt(self.request)
        assert twin.request.kv is not None
        twin.kv = twin.request.kv
        return twin

    def positions(self, layer: int, head: int = 0) -> list[int]:
        """True positions of the rows that one head stores."""
        for part in self.kv.layers[layer].read():
            heads = list(range(part.size[0])) if part.heads is None else part.heads.tolist()
            if head in heads:
                return part.positions.expand(len(heads), -1)[heads.index(head)].tolist()
        return []


def walk(model: Model, prompt: Sequence[int], steps: Sequence[Sequence[int]], **methods: Any) -> Tensor:
    """Feed the prompt whole and then each step's tokens. -> logits of all rows [T, V]."""
    one = Walk(model, prompt, **methods)
    return torch.cat([one.feed(prompt), *(one.feed(step) for step in steps)])


def cuts(tokens: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """`tokens` in pieces of these sizes, over and over."""
    pieces, at, i = [], 0, 0
    while at < len(tokens):
        pieces.append(list(tokens[at : at + sizes[i % len(sizes)]]))
        at += sizes[i % len(sizes)]
        i += 1
    return pieces


class Recorder(Attend):
    """Dense attention that keeps every row's probabilities: {layer: [hq, T, T]}, for one prompt fed in any chunks."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.seen: dict[int, Tensor] = {}

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(Custom(self.attend))

    def attend(self, reads: Sequence[Read]) -> list[Tensor]:
        for read in reads:
            logits = ops.scores(read.q, read.part.k, read.scale).flatten(0, 1)  # [hq, R, N]
            mask = read.part.positions[:, None] <= read.q_positions[:, None]  # [1, R, N]
            spec = read.step.model.config.attention[read.layer]
            if spec.window is not None:
                mask = mask & (read.q_positions[:, None] - read.part.positions[:, None] < spec.window)
            heads, _, n = logits.shape
            whole = self.seen.setdefault(read.layer, torch.zeros(heads, self.rows, self.rows))
            whole[:, read.q_positions, :n] = logits.masked_fill(~mask, float("-inf")).softmax(-1)
        return [read.attend() for read in reads]


class Masked(Evict):
    """An evictor that gives nothing up but shows each row only what `sees(layer, head, q, k)` says: the slow truth."""

    observes = 0

    def __init__(self, sees: Callable[[int, int, int, int], bool]) -> None:
        self.sees = sees

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(record=Record(self.view))

    def view(self, read: Read) -> View:
        heads = read.part.size[0]
        k = read.part.positions.expand(heads, -1).tolist()
        q = read.q_positions.tolist()
        return View(torch.tensor([[[self.sees(read.layer, h, i, j) for j in k[h]] for i in q] for h in range(heads)]))

    def due(self, request: Request) -> bool:
        return False

    def keep(self, request: Request, layer: int) -> None:
        return None


class Uneven(Evict):
    """Gives every head and layer a budget of its own when the prompt is complete: AdaKV's shape, without its scores."""

    observes = 0

    def __init__(self, stay: Sequence[Sequence[Sequence[int]]]) -> None:
        self.stay = stay

    def plan(self, span: Span) -> AttentionPlan:
        return EVERYTHING

    def due(self, request: Request) -> bool:
        return not request.prefilling and "uneven" not in request.state

    def keep(self, request: Request, layer: int) -> list[Tensor]:
        if layer == len(self.stay) - 1:
            request.state["uneven"] = True
        return [torch.tensor(list(slots)) for slots in self.stay[layer]]


# ---- engines
class Scripted(Method, Drafter):
    """Drafts trees along known outputs: the right tokens mixed with wrong ones and wrong siblings, so that a step keeps
    anything from nothing to a whole branch."""

    traits: ClassVar[Traits] = Traits("draft")

    def __init__(self, script: dict[tuple[int, ...], list[int]], seed: int = 0) -> None:
        self.script, self.seed = script, seed

    def size(self, request: Request) -> int:
        return 9

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._one(request).cut(budget) for request, budget in zip(requests, budgets)]

    def _one(self, request: Request) -> Draft:
        rng = random.Random(f"{self.seed} {request.known}")
        truth = self.script[tuple(request.prompt)][request.n_out :]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for right in truth[: rng.randint(0, 5)]:
            wrong = 3 + (right + rng.randint(1, 50)) % 60
            pair = [right, wrong] if rng.random() < 0.5 else [wrong, right]
            if rng.random() < 0.15:
                pair = [wrong]
            for token in pair:
                tokens.append(token)
                parents.append(parent)
            if right not in pair:
                break
            parent = len(tokens) - len(pair) + pair.index(right)
        return Draft(tokens, parents)

    def learn(self, spans: Any, hidden: Any, outcomes: Any, tops: Any = None) -> None:
        pass


def drafting(verbs: dict[str, str], script: dict[tuple[int, ...], list[int]], **limits: Any) -> Placed:
    """An engine with these methods whose decoding is speculative, along a script."""
    methods = {**parse(verbs), "decode": Speculative(Scripted(script), Match())}
    return Builder(tiny.model(), methods, Limits(kv_bytes=limits.pop("kv_bytes", 64 << 20), **limits),
                   load=tiny.load).build()  # fmt: skip


@cache
def sliding(window: int, layers: int, dtype: torch.dtype | None = None, hidden: int = 48) -> Model:
    """A tiny model whose layers see `window` rows."""
    path = Path(tempfile.mkdtemp(prefix="phasewise-sliding-"))
    shutil.copytree(tiny.checkpoint(layers=layers, hidden=hidden), path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    (path / "config.json").write_text(json.dumps(config))
    return Model.load(path, dtype=dtype)


@cache
def mixed(window: int) -> Model:
    """A tiny model of which every second layer sees `window` rows, the others all."""
    model = Model.load(tiny.checkpoint())
    specs = tuple(replace(spec, window=None if i % 2 else window) for i, spec in enumerate(model.config.attention))
    model.config = replace(model.config, attention=specs)
    return model
