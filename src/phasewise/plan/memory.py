"""KV as numbers: what rows would take from the engine's own ledger, and find in its own prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from phasewise.kv.buffer import Ledger, rounded
from phasewise.kv.prefix import Node, PrefixCache, PrefixTree
from phasewise.request.counters import Counters
from phasewise.verbs.traits import Traits

if TYPE_CHECKING:
    from phasewise.plan.sequence import SimulatedSequence


class RequestKV:
    """The KV of one request: room for `cap` rows, of which `spare` are not used."""

    __slots__ = ("cap", "nodes", "spare", "store")

    def __init__(self, store: NumberStore, cap: int) -> None:
        self.store, self.cap, self.spare = store, cap, cap
        self.nodes: list[Node] = []
        store.ledger.add(cap * store.row_bytes)

    @property
    def bytes(self) -> int:
        return self.cap * self.store.row_bytes

    def growth(self, rows: int) -> int:
        """Bytes that `reserve(rows)` would take."""
        if rows <= self.spare:
            return 0
        return (rounded(self.cap - self.spare + rows) - self.cap) * self.store.row_bytes

    def reserve(self, rows: int) -> None:
        if rows > self.spare:
            more = rounded(self.cap - self.spare + rows) - self.cap
            self.store.ledger.add(more * self.store.row_bytes)
            self.cap += more
            self.spare += more

    @property
    def names(self) -> list[str]:
        """Names of its planes in a pool's memory: there are none."""
        return []

    def lend(self) -> None:
        """Give the room up for another worker of the pool to adopt (`Account.lend`)."""
        self.close()

    def close(self) -> None:
        self.store.ledger.add(-self.bytes)
        for node in self.nodes:
            node.release()
        self.nodes = []


class NumberRows:
    """Rows that are only counted, for the prefix cache."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes

    def size(self, block: int) -> int:
        return block * self.row_bytes

    def copy(self, start: int, stop: int) -> list[list[Tensor]]:
        return []


class NumberStore:
    """Room for requests under a ledger. `caching`: whether prompts share prefixes."""

    def __init__(self, row_bytes: int, ledger: Ledger, caching: bool) -> None:
        self.row_bytes, self.ledger = row_bytes, ledger
        self.prefixes = PrefixCache(ledger)
        self.tree: PrefixTree | None = self.prefixes.tree("numbers") if caching else None
        self._rows = NumberRows(row_bytes)

    def cost(self, tokens: int) -> int:
        return rounded(tokens) * self.row_bytes

    def room(self, n_bytes: int) -> bool:
        return self.prefixes.room(n_bytes)

    def open(self, job: SimulatedSequence, tokens: int) -> RequestKV:
        """Room for `tokens` rows, those of the longest cached prefix there already. The last row of a prompt is always
        computed."""
        held = RequestKV(self, rounded(tokens))
        hit = 0
        if self.tree is not None:
            held.nodes = self.tree.match(job.tokens[: job.prompt_len - 1])
            hit = sum(node.rows for node in held.nodes)
        held.spare -= hit
        job.begin(hit)
        return held

    def remember(self, job: SimulatedSequence) -> None:
        """Keep a prompt that is computed for others, as far as the budget allows."""
        if self.tree is not None and job.kv is not None:
            job.kv.nodes, _ = self.tree.insert(job.tokens, self._rows, job.kv.nodes)


class NumberDecode:
    """The decode method of a simulated request: it goes on from no other request's KV."""

    def follows(self, params: object) -> None:
        return None


class NumberPhase:
    """The phase that computes a simulated prompt."""

    decode = NumberDecode()


class NumberRuntime:
    """The simulated part of an engine's runtime: a store, and counters."""

    companions: Sequence[object] = ()
    phases = (NumberPhase(),)
    traits = Traits("decode")

    def __init__(self, store: NumberStore) -> None:
        self.store, self.counters = store, Counters()

    def need(self, tokens: int, shared: int = 0) -> int:
        return self.store.cost(tokens) - shared * self.store.row_bytes
