"""What happened: counters of work done, and time stamps of every transition of a request."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """Work done since start. None of these depend on the machine's speed, so tests and comparisons may rely on them."""

    steps: int = 0
    forwards: int = 0  # passes of the target model
    draft_forwards: int = 0  # passes of companion models (draft, amateur, ...)
    rows: int = 0  # token rows that entered the target model's first layer
    row_layers: int = 0  # (row, layer) pairs of the target model
    head_rows: int = 0  # rows that went through the language-model head
    kv_bytes_read: int = 0
    kv_bytes_written: int = 0
    kv_bytes_moved: int = 0  # copies: compaction, copy-on-write, prefix reuse, hand-off
    drafted: int = 0  # draft nodes verified
    accepted: int = 0  # draft nodes accepted
    expert_loads: int = 0  # distinct experts used, summed over (forward, layer)
    prefix_hits: int = 0  # prompt rows taken from the prefix cache
    recomputed: int = 0  # rows computed again after a preemption or a lost hand-off
    preemptions: int = 0
    handoffs: int = 0
    kv_bytes_sent: int = 0  # KV put down for other workers ...
    kv_bytes_exposed: int = 0  # ... of these, once its prompt was done: what the second token waits for
    push_fallbacks: int = 0  # requests whose KV was to travel while their prompt was computed, and did not
    restarts: int = 0  # requests started again from their tokens, for a lost worker or a lost hand-off
    workers_lost: int = 0
    emitted: int = 0  # tokens given to requests

    def count(self, name: str, n: int) -> None:
        setattr(self, name, getattr(self, name) + n)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __add__(self, other: Counters) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: Counters) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})


@dataclass(slots=True)
class Trace:
    """Time stamps (seconds of the engine's clock) of one request; latencies are derived, never stored."""

    arrived: float
    admitted: float | None = None
    sent: float | None = None  # its KV set out for another engine ...
    owned: float | None = None  # ... which went on with it, or starts it anew
    tokens: list[float] = field(default_factory=list)  # one per emission, with `counts` tokens each
    counts: list[int] = field(default_factory=list)
    left: float | None = None

    def enter(self, now: float) -> None:
        """It comes to an engine whose clock shows `now`. Times by another engine's clock, which may be another
        machine's, are moved so that its last token came just now."""
        late = now - (self.tokens[-1] if self.tokens else self.arrived)
        self.arrived += late
        self.tokens = [at + late for at in self.tokens]

    def emitted(self, now: float, n: int) -> None:
        self.tokens.append(now)
        self.counts.append(n)

    @property
    def queued(self) -> float | None:
        """Seconds between arrival and admission."""
        return None if self.admitted is None else self.admitted - self.arrived

    @property
    def handoff(self) -> float | None:
        """Seconds that its KV was on its way to another engine."""
        return None if self.sent is None or self.owned is None else self.owned - self.sent

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds."""
        return self.tokens[0] - self.arrived if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first, seconds; None with fewer than two tokens."""
        n = sum(self.counts)
        return (self.tokens[-1] - self.tokens[0]) / (n - 1) if n > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies, seconds: gaps between successive emissions."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:])]
