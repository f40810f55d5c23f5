"""Requests without a model: as the one who sent them sees them, and as a simulated worker computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from phasewise.bench.latency import TAIL, percentile
from phasewise.plan.drafts import NONE, Drafts
from phasewise.request.params import SLO, Params
from phasewise.request.request import Departure
from phasewise.request.trace import Trace

if TYPE_CHECKING:
    from phasewise.plan.memory import RequestKV

_PARAMS, _SLO = Params(), SLO()  # of requests that ask for nothing else


@dataclass(slots=True, eq=False)
class Stamps:
    """Moments of one request, seconds, noted by the engines that compute it. `begun`: the first step that has rows of
    it. `tokens`: when each came; None: not noted, as nobody asks and it takes time."""

    tokens: list[float] | None
    begun: float | None = None

    def resume(self, n: int) -> None:
        """It goes on from so many tokens: those that nobody was told of are computed again."""
        if self.tokens is not None:
            del self.tokens[n:]


class SimulatedRequest:
    """A request of a load: `tokens` to read, `new` tokens to write, and what it was given when.

    The router takes it for a `Request`. `tokens` are those of the prompt, as far as anybody asks who they are; see
    `plan.arrivals`. `arrived` is when it was sent, seconds; the router hears of it after the lag of its server.
    `stamps`: what its steps note of it, wherever they run.
    """

    __slots__ = (
        "arrived", "cached", "computed", "first_token", "high_water", "id", "known", "last_token", "left", "new",
        "params", "parent", "pool", "prompt_len", "recalled", "recipe", "scores", "slo", "stamps", "tokens", "trace",
    )  # fmt: skip

    def __init__(self, id: str, tokens: Sequence[int], new: int, arrived: float, slo: SLO = _SLO) -> None:
        self.id, self.tokens, self.new, self.arrived, self.slo = id, tokens, new, arrived, slo
        self.params, self.recipe, self.parent = _PARAMS, "", None
        self.prompt_len = self.known = len(tokens)
        self.computed = self.high_water = self.recalled = self.cached = 0
        self.scores: dict[int, Any] = {}
        self.pool = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.left: Departure | None = None
        self.trace = Trace()
        self.stamps = Stamps([] if slo.tbt is not None else None)

    # ---- what the router asks of a request
    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt_len

    @property
    def n_out(self) -> int:
        return self.known - self.prompt_len

    @property
    def prompt(self) -> Sequence[int]:
        return self.tokens

    def header(self) -> dict[str, Any]:
        """Returns what a simulated worker needs to compute it: the numbers of the request itself."""
        return {"id": self.id, "source": self}

    def emit(self, tokens: Sequence[int], eos: Sequence[int], now: float) -> int:
        """It is given so many tokens. Returns how many were taken."""
        self.known += len(tokens)
        self.last_token = now
        if self.first_token is None:
            self.first_token = now
        if self.n_out >= self.new:
            self.left = Departure("finished", "length")
        return len(tokens)

    # ---- what came of it
    @property
    def finished(self) -> bool:
        """It has all its tokens."""
        return self.left is not None and self.left.how == "finished"

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two."""
        if self.first_token is None or self.last_token is None or self.n_out < 2:
            return None
        return (self.last_token - self.first_token) / (self.n_out - 1)

    @property
    def waited(self) -> float | None:
        """Seconds from its arrival to the first step that computes rows of it: its scheduling delay."""
        return None if self.stamps.begun is None else self.stamps.begun - self.arrived

    @property
    def tbt(self) -> list[float]:
        """Times between its tokens, seconds. They are known where its targets name one for them."""
        times = self.stamps.tokens
        return [] if times is None else [later - earlier for earlier, later in pairwise(times)]

    def meets(self, slo: SLO) -> bool:
        """It came in full and within all targets; a missing target is met."""
        ttft = self.ttft
        return self.finished and ttft is not None and slo.met(ttft, self.tpot, lambda: percentile(self.tbt, TAIL))


class SimulatedSequence:
    """A request in a simulated engine. It advances as the engine's requests do: what is known and not yet computed goes
    through steps, and whoever is through gets a token. With `drafts`, a decode brings guesses, and `gained` tokens come
    of its last step.

    It starts from the numbers of its `source`, be that the request or a sequence at another worker. `attempt` is the
    router's number of the attempt; `told` are the tokens that the router knows of.
    """

    __slots__ = (
        "arrived",
        "attempt",
        "computed",
        "departs",
        "depth",
        "drafts",
        "first_token",
        "gained",
        "high_water",
        "id",
        "known",
        "kv",
        "last_token",
        "layers",
        "left",
        "luck",
        "new",
        "params",
        "parent",
        "prefilling",
        "prompt_len",
        "recipe",
        "rows",
        "slice",
        "slo",
        "stamps",
        "state",
        "tokens",
        "told",
    )  # fmt: skip

    def __init__(self, source: SimulatedRequest | SimulatedSequence, attempt: int, computed: int = 0) -> None:
        self.id: str = source.id
        self.tokens: Sequence[int] = source.tokens
        self.new: int = source.new
        self.slo: SLO = source.slo
        self.stamps: Stamps = source.stamps
        self.arrived: float = source.arrived
        self.first_token: float | None = source.first_token
        self.last_token: float | None = source.last_token
        self.known: int = source.known
        self.high_water: int = source.high_water
        self.prompt_len: int = source.prompt_len
        self.attempt, self.told = attempt, self.known
        self.stamps.resume(self.known - self.prompt_len)
        self.params, self.recipe, self.parent = _PARAMS, "", None
        self.depth = self.layers = self.gained = 0
        self.drafts: Drafts = NONE
        self.luck: Random | None = None  # of its guesses
        self.kv: RequestKV | None = None
        self.slice: int | None = None  # rows of one under way
        self.state: dict[str, Any] = {}
        self.departs = False
        self.left: str | None = None  # why it ended: "length", or what went wrong
        self.begin(computed)

    @property
    def n_out(self) -> int:
        return self.known - self.prompt_len

    @property
    def limit(self) -> int:
        """Tokens it can ever hold."""
        return self.prompt_len + self.new

    def begin(self, computed: int) -> None:
        """Start with so many rows computed: none, or those of a cached prefix."""
        self.computed = computed
        self.prefilling = computed < self.prompt_len
        self.rows = (self.prompt_len if self.prefilling else self.known) - computed

    def guess(self, drafts: Drafts) -> None:
        """Its decodes bring guesses from now on."""
        self.drafts = drafts
        if drafts.depth and not self.prefilling and self.known - self.computed == 1:
            self.rows = 1 + self._guesses

    @property
    def _guesses(self) -> int:
        """Guesses that it may still make use of: one token follows them."""
        return max(0, min(self.drafts.depth, self.prompt_len + self.new - self.known - 1))

    def _held(self, guesses: int) -> int:
        if self.luck is None:
            self.luck = self.drafts.luck(self.id)
        return self.drafts.held(guesses, self.luck)

    def advance(self, rows: int, layers: tuple[int, int] | None, now: float) -> bool:
        """A step has run `rows` of its rows, through these layers (None: all). Returns whether that brought a token."""
        if layers is not None and layers[1] < self.layers:
            self.depth, self.slice = layers[1], rows
            self.rows = rows
            return False
        self.depth, self.slice = 0, None
        held = 0
        if not self.prefilling and (guesses := self.computed + rows - self.known) > 0:
            held = self._held(guesses)
            rows -= guesses - held  # what does not hold is taken back
        self.computed += rows
        if self.kv is not None:
            self.kv.spare -= rows
        self.prefilling = self.computed < self.prompt_len
        if self.computed < self.known:
            self.rows = (self.prompt_len if self.prefilling else self.known) - self.computed
            return False
        self.gained = 1 + held
        self.known += self.gained
        self.rows = 1 + self._guesses if self.drafts.depth else 1
        self.last_token = now
        if self.stamps.tokens is not None:
            self.stamps.tokens.extend([now] * self.gained)
        if self.first_token is None:
            self.first_token = now
        if self.known >= self.prompt_len + self.new:
            self.left = "length"
        return True

    def write(self, now: float) -> bool:
        """A step has run its one row, that of its last token, through all layers: `advance`, in short. Returns whether
        it is done."""
        known = self.known
        self.high_water = self.computed = known
        self.kv.spare -= 1  # type: ignore[union-attr]
        self.gained = self.rows = 1
        self.known = known = known + 1
        self.last_token = now
        if self.stamps.tokens is not None:
            self.stamps.tokens.append(now)
        if known < self.prompt_len + self.new:
            return False
        self.left = "length"
        return True

    def release(self) -> None:
        """Give up its KV, as at a preemption."""
        kv, self.kv = self.kv, None
        self.slice, self.depth = None, 0
        if kv is not None:
            kv.close()
