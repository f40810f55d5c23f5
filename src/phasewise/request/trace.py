"""Time stamps of every transition of a request; latencies are derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Trace:
    """Time stamps (seconds of the engine's clock) of one request; latencies are derived, never stored."""

    arrived: float = 0.0
    admitted: float | None = None
    sent: float | None = None  # its KV set out for another engine ...
    owned: float | None = None  # ... which went on with it, or starts it anew
    tokens: list[float] = field(default_factory=list)  # one per emission, with `counts` tokens each
    counts: list[int] = field(default_factory=list)
    left: float | None = None
    by: dict[str, str] = field(default_factory=dict)  # where there are workers: by stage, whose doing it was

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
        """Seconds that its KV was last on its way to another engine; None if it never went, or did not arrive."""
        arrived = self.sent is not None and self.owned is not None and self.owned >= self.sent
        return self.owned - self.sent if arrived else None  # type: ignore[operator]

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
    def tbt(self) -> list[float]:
        """Times between successive tokens, seconds, in no order: those of one emission have 0 between them."""
        return [*self.itl, *[0.0] * (sum(self.counts) - len(self.counts))]

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies, seconds: gaps between successive emissions."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:])]
