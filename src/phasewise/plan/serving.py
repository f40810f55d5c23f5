"""What a server adds to its engine's steps: measured over HTTP, on requests of a few fixed sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phasewise.bench.latency import Served
from phasewise.bench.prompts import Prompts
from phasewise.bench.workloads import Shot
from phasewise.plan.beside import Beside
from phasewise.plan.cost import Cost, Step

PROMPTS, STREAMS = (32, 256), (1, 4, 8)  # tokens of prompts that come alone, and requests that decode together
EACH = 6  # prompts of each size
NEW = 96  # tokens of a stream
SHORT = 16  # prompt tokens of a stream
Ask = Callable[[Sequence[Shot]], Sequence[Served]]  # requests at their times -> how they were served


@dataclass(frozen=True)
class Serving:
    """`lag`: seconds of a request outside of any step, on its way in and out. `step`: seconds that each step of decodes
    takes longer than in an engine alone. `beside`: how much longer steps take while another worker is busy, with all
    that the server does meanwhile."""

    lag: float = 0.0
    step: float = 0.0
    beside: Beside = field(default_factory=dict)


def prompt(rows: int) -> Step:
    """A whole prompt in one step."""
    return Step(prefill_rows=rows, pairs=rows * (rows + 1) / 2, prefixes=rows, ended=rows, emits=1)


def decodes(requests: int, context: float) -> Step:
    return Step(decode_rows=requests, context=round(requests * context), emits=requests)


@dataclass
class Asking:
    """One server that is asked, and what its steps cost without it."""

    ask: Ask
    prompts: Prompts
    cost: Cost

    def measure(self, workers: bool) -> Serving:
        """`workers`: whether prompts and decodes are computed by different ones, at the same time."""
        self.ask([Shot(0.0, self.prompts(SHORT), 8) for _ in range(4)])  # warms up
        lag = max(0.0, statistics.median(self._ttft(rows) - self.cost.seconds(prompt(rows)) for rows in PROMPTS))
        step = max(0.0, statistics.median(self._tpot(n) - self._alone(n) for n in STREAMS))
        if not workers:
            return Serving(lag, step)
        streams, rows = STREAMS[1], PROMPTS[-1]
        ttft, tpot = self._both(streams, rows)
        prefill = (ttft - lag) / self.cost.seconds(prompt(rows))
        decode = tpot / (self._alone(streams) + step)
        return Serving(lag, step, {"prefill": {"decode": max(1.0, prefill)}, "decode": {"prefill": max(1.0, decode)}})

    def _ttft(self, rows: int) -> float:
        """Of prompts that come one after the other, each when the one before is long done."""
        gap = 0.05 + 3 * self.cost.seconds(prompt(rows))
        served = self.ask([Shot(gap * i, self.prompts(rows), 1) for i in range(EACH)])
        return statistics.median(one.trace.ttft or 0.0 for one in served)

    def _alone(self, streams: int) -> float:
        """What a step of such streams takes without a server."""
        return self.cost.seconds(decodes(streams, SHORT + NEW / 2))

    def _tpot(self, streams: int) -> float:
        served = self.ask([Shot(0.0, self.prompts(SHORT), NEW) for _ in range(streams)])
        return statistics.median(one.trace.tpot or 0.0 for one in served)

    def _both(self, streams: int, rows: int) -> tuple[float, float]:
        """TTFT and time between tokens while streams go on and prompts come so that one worker is always at one."""
        each = self.cost.seconds(prompt(rows))
        tokens = round(2 * EACH * each / self._alone(streams))
        going = [Shot(0.0, self.prompts(SHORT), NEW + tokens) for _ in range(streams)]
        first = streams * self.cost.seconds(prompt(SHORT)) + 20 * self._alone(streams)
        coming = [Shot(first + 1.5 * each * i, self.prompts(rows), 1) for i in range(EACH)]
        served = self.ask([*going, *coming])
        ttfts = [one.trace.ttft or 0.0 for one in served[streams:]]
        busy = [(one.trace.arrived, one.trace.arrived + (one.trace.ttft or 0.0)) for one in served[streams:]]
        gaps = [
            later - earlier
            for one in served[:streams]
            for earlier, later in zip(one.trace.tokens, one.trace.tokens[1:])
            if any(start <= earlier and later <= end for start, end in busy)
        ]
        return statistics.median(ttfts), statistics.fmean(gaps) if gaps else 0.0
