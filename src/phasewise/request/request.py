"""A request: what was asked, what is known, what is computed. The phase is derived from these, never stored."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from phasewise.request.drawer import Drawer
from phasewise.request.params import SLO, Params
from phasewise.request.pool import Pool
from phasewise.request.score import Score
from phasewise.request.trace import Trace

if TYPE_CHECKING:
    from phasewise.kv.cache import KV
    from phasewise.model.lowrank import Delta
    from phasewise.step.span import Span

log = logging.getLogger(__name__)
_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Departure:
    """The way a request left: `finished` (stop | length), `cancelled`, or `failed` (reason is the text of the error),
    be it for what it `asked`."""

    how: Literal["finished", "cancelled", "failed"]
    reason: str
    asked: bool = False


class Request:
    """One sequence on its way through the phases.

    `tokens` is everything known (prompt, then output); `computed` of them are in the KV. `state` is a drawer per
    method, emptied when the request is preempted or leaves; drawers of plain data and tensors move with the KV to
    another engine, others are left behind like at a preemption. `groups`: the sizes of the groups of its output's
    tokens, each of which enters the model as one row at the position of its last token; empty where all tokens have
    rows of their own. They are kept where drawers are not, since they say what to compute again. `watch`, if given, is
    told each emitted token and answers True where the text has to stop (stop strings). `recipe` names the methods it is
    computed with; "" = the engine's own.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: Params | None = None,
        *,
        id: str | None = None,
        slo: SLO | None = None,
        watch: Callable[[int], bool] | None = None,
        recipe: str = "",
    ) -> None:
        self.id = id if id is not None else f"r{next(_ids)}"
        self.params = params or Params()
        self.slo = slo or SLO()
        self.recipe = recipe
        self.watch = watch
        self.tokens: list[int] = list(prompt)
        self.prompt_len = len(self.tokens)
        self.computed = 0
        self.groups: list[int] = []
        self.rows = 0  # rows it would bring to the next step; the engine keeps it up to date
        self.until: int | None = None  # the position that drafts of the next step must not reach; likewise
        self.slice: Span | None = None  # one under way that has not reached the last layer: a step may run part of it
        self.depth = 0  # the layers it has run
        self.layers = 0  # layers of the model; the engine that accepts it fills it in ...
        self.ends: Sequence[int] = ()  # ... its end tokens ...
        self.lora: Delta | None = None  # ... and the adapter of its recipe, which its rows run with
        self.kv: KV | None = None
        self.state: dict[str, Any] = {}
        self.high_water = 0  # rows ever computed: what lies below it is recomputation
        self.departs = False  # leaves for another engine when its prompt is done, even if this one could go on
        self.parent: Request | None = None  # a sibling of `parent` waits for its prefill and forks its KV
        self.left: Departure | None = None
        self.scores: dict[int, Score] = {}  # by position, of the tokens whose likelihood it asks for
        self.cached = 0  # rows of its prompt that the prefix cache had, or the tiers below it
        self.recalled = 0  # rows of its prompt that were given: another request's, or made of another model's
        self.pool: Pool | None = None  # of its prompt's rows, if it asks for a vector
        self.trace = Trace()

    # ---- the only truth about progress
    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt_len

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.prompt_len]

    @property
    def out(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def n_out(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def known_rows(self) -> int:
        """Rows that its known tokens take in the KV, as far as nothing is evicted or added."""
        return self.known - sum(self.groups) + len(self.groups)

    def groups_from(self, position: int) -> list[int]:
        """The sizes of the groups of its output from `position` on, where one begins."""
        first, left = len(self.groups), self.known - position
        while left > 0:
            first -= 1
            left -= self.groups[first]
        assert left == 0, "no group of tokens begins there"
        return self.groups[first:]

    def note_groups(self, sizes: Sequence[int]) -> None:
        """Its last tokens have come in groups of these sizes; the first of them may be known already."""
        found, missing = list(sizes), self.n_out - sum(self.groups)
        while sum(found) > missing:
            found.pop(0)
        self.groups += found

    @property
    def limit(self) -> int:
        """Tokens it can ever hold."""
        return self.prompt_len + self.params.max_tokens

    @property
    def cacheable(self) -> int:
        """The number of prompt rows that may come from a prefix cache, by what it asks: none if it asks for a vector,
        those before the first scored token if it asks for its prompt's log-probabilities, otherwise all."""
        if self.params.pooling is not None:  # `last` needs one row only, but one way to count them is enough
            return 0
        return self.prompt_len if self.params.prompt_logprobs is None else self.params.scored_from - 1

    # ---- what schedulers may know besides (schedule.Job)
    @property
    def arrived(self) -> float:
        return self.trace.arrived

    @property
    def first_token(self) -> float | None:
        return self.trace.tokens[0] if self.trace.tokens else None

    @property
    def last_token(self) -> float | None:
        return self.trace.tokens[-1] if self.trace.tokens else None

    def header(self) -> dict[str, Any]:
        """Returns what another engine needs to go on with it, but for its KV: plain data, which JSON carries."""
        return {
            "id": self.id,
            "tokens": list(self.tokens),
            "prompt_len": self.prompt_len,
            "computed": self.computed,
            "high_water": self.high_water,
            "groups": list(self.groups),
            "params": {f.name: getattr(self.params, f.name) for f in fields(Params) if f.init},
            "slo": [self.slo.ttft, self.slo.tpot, self.slo.tbt],
            "recipe": self.recipe,
            "arrived": self.trace.arrived,
            "emitted": [list(pair) for pair in zip(self.trace.tokens, self.trace.counts)],
        }

    def emit(self, tokens: Sequence[int], eos: Sequence[int], now: float) -> int:
        """Append accepted tokens up to the first that ends the request (DESIGN law 9). Returns how many were taken."""
        taken = 0
        for token in tokens:
            if not self.params.max_tokens:  # it is for its prompt alone
                self.left = Departure("finished", "length")
                break
            self.tokens.append(token)
            taken += 1
            ends = token in self.params.stop_tokens or (token in eos and not self.params.ignore_eos)
            if ends or (self.watch is not None and self.watch(token)):
                self.left = Departure("finished", "stop")
            elif self.n_out >= self.params.max_tokens:
                self.left = Departure("finished", "length")
            if self.left:
                break
        if taken:
            self.trace.emitted(now, taken)
        if self.left and self.scores:  # of what was drawn beyond the end
            self.scores = {at: score for at, score in self.scores.items() if at < self.known}
        return taken

    def sibling(self, index: int) -> Request:
        """A request for another sample of the same prompt: it shares this one's prefill and draws with its own seed."""
        twin = Request(
            self.prompt,
            replace(self.params, seed=(self.params.seed + 0x9E3779B97F4A7C15 * index) & (2**63 - 1)),
            id=f"{self.id}.{index}",
            slo=self.slo,
            recipe=self.recipe,
        )
        twin.parent, twin.trace.arrived = self, self.trace.arrived
        return twin

    def adopt(self, other: Request) -> None:
        """Continue from `other`'s progress: its tokens, its KV (copy-on-write) and its methods' drawers, but for those
        that a method has already filled for this request (draws of its own)."""
        assert other.kv is not None
        self.tokens = list(other.tokens)
        self.groups = list(other.groups)
        self.computed = self.high_water = other.computed
        self.kv = other.kv.fork()
        self.scores |= {at: score for at, score in other.scores.items() if at < self.prompt_len}
        self.state |= {name: fork_state(value) for name, value in other.state.items() if name not in self.state}

    def step_back(self, rows: int) -> None:
        """Give up its last rows, to compute them once more: `computed` says that they are to come."""
        assert self.kv is not None and self.computed - rows >= self.prompt_len, "rows of the prompt stay"
        assert not self.groups, "rows of groups are computed once"
        self.computed -= rows
        self.kv.drop_last(self.computed)

    def release(self) -> None:
        """Give up KV and every method's drawer (a `Drawer` is closed)."""
        state, self.state = self.state, {}
        kv, self.kv = self.kv, None
        self.slice, self.depth = None, 0
        if kv is not None:
            kv.close()
        for name, value in state.items():
            try:
                if isinstance(value, Drawer):
                    value.close()
            except Exception:  # memory must come back whatever a method does
                log.exception("request %s: the drawer of %s could not be closed", self.id, name)

    def __repr__(self) -> str:
        return f"Request({self.id}, prompt={self.prompt_len}, out={self.n_out}, computed={self.computed}, {self.left})"


def fork_state(value: Any) -> Any:
    """A copy of a method's state: by its own `fork` if it is a `Drawer`, else by deep copy."""
    return value.fork() if isinstance(value, Drawer) else copy.deepcopy(value)
