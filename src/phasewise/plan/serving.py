"""The overhead of a server over its engine's steps, measured over HTTP on requests of a few fixed sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from phasewise.bench.latency import ServedRequest
from phasewise.bench.prompts import Prompts
from phasewise.bench.workloads import Shot
from phasewise.plan.beside import Beside
from phasewise.plan.cost import Cost, StepWork

PROMPTS, STREAMS = (32, 256), (1, 4, 8, 16)  # tokens of prompts that come alone, and requests that decode together
EACH = 6  # prompts of each size
AMONG = 24  # short prompts that come while others decode
ROUNDS = 3  # of everything: a median of them counts
NEW = 96  # tokens of a stream
SHORT = 16  # prompt tokens of a stream
Ask = Callable[[Sequence[Shot]], Sequence[ServedRequest]]  # requests at their times -> how they were served


@dataclass(frozen=True)
class Serving:
    """The overhead of a server. Server and clients want the same cores as the model's steps, so what they do
    for each token and each request delays all that is being decoded. `lag`: seconds of a request outside of any step,
    on its way in and out. `step`, `token`, `request`: seconds that a step with decodes takes longer than in an engine
    alone, whatever it computes, for each token that comes of it, and for each prompt that is done with it. `beside`:
    how much longer steps take while another worker is busy, with all that the server does meanwhile."""

    lag: float = 0.0
    step: float = 0.0
    token: float = 0.0
    request: float = 0.0
    beside: Beside = field(default_factory=dict)

    def added(self, step: StepWork, done: int) -> float:
        """Seconds that a step takes longer, with which so many prompts are `done`."""
        return self.step + self.token * step.emits + self.request * done if step.decode_rows else 0.0


def prompt(rows: int) -> StepWork:
    """A whole prompt in one step."""
    return StepWork(prefill_rows=rows, pairs=rows * (rows + 1) / 2, prefixes=rows, ended=rows, emits=1)


def decodes(requests: int, context: float) -> StepWork:
    return StepWork(decode_rows=requests, context=round(requests * context), emits=requests)


@dataclass
class Asking:
    """One server that is asked, and what its steps cost without it."""

    ask: Ask
    prompts: Prompts
    cost: Cost

    def measure(self, workers: bool) -> Serving:
        """`workers`: whether prompts and decodes are computed by different ones, at the same time."""
        self.ask([Shot(0.0, self.prompts(SHORT), 8) for _ in range(4)])  # warms up
        late = [self._ttft(rows) - self.cost.seconds(prompt(rows)) for _ in range(ROUNDS) for rows in PROMPTS]
        tpots = [[self._tpot(n) for n in STREAMS] for _ in range(ROUNDS)]
        more = [statistics.median(of) - self._alone(n) for n, of in zip(STREAMS, zip(*tpots, strict=True), strict=True)]
        step, token = rising([(n, seconds, self._alone(n)) for n, seconds in zip(STREAMS, more, strict=True)])
        found = Serving(max(0.0, statistics.median(late)), step, token)
        streams = STREAMS[1]
        if not workers:
            request = statistics.median(self._request(streams, found) for _ in range(ROUNDS))
            return replace(found, request=max(0.0, request))
        return replace(found, beside=self._slower(streams, found))

    def _slower(self, streams: int, known: Serving) -> Beside:
        """Returns how much longer a prompt takes while another worker decodes, and a step of decodes meanwhile."""
        rows = PROMPTS[-1]
        both = [self._both(streams, rows) for _ in range(ROUNDS)]
        prefill = (statistics.median(ttft for ttft, _ in both) - known.lag) / self.cost.seconds(prompt(rows))
        alone = self._alone(streams) + known.added(decodes(streams, 1), 0)
        decode = statistics.median(tpot for _, tpot in both) / alone
        return {"prefill": {"decode": max(1.0, prefill)}, "decode": {"prefill": max(1.0, decode)}}

    def _ttft(self, rows: int) -> float:
        """Returns the median TTFT of prompts that come one after the other, each alone."""
        gap = 0.05 + 3 * self.cost.seconds(prompt(rows))
        served = self.ask([Shot(gap * i, self.prompts(rows), 1) for i in range(EACH)])
        return statistics.median(one.trace.ttft or 0.0 for one in served)

    def _alone(self, streams: int) -> float:
        """Returns the seconds of a step of such streams without a server."""
        return self.cost.seconds(decodes(streams, SHORT + NEW / 2))

    def _tpot(self, streams: int) -> float:
        served = self.ask([Shot(0.0, self.prompts(SHORT), NEW) for _ in range(streams)])
        return statistics.median(one.trace.tpot or 0.0 for one in served)

    def _both(self, streams: int, rows: int) -> tuple[float, float]:
        """TTFT and time between tokens while streams go on and prompts come so that one worker is always at one."""
        going, coming = self._among(streams, rows, EACH, 1.5 * self.cost.seconds(prompt(rows)))
        busy = [(one.trace.arrived, one.trace.arrived + (one.trace.ttft or 0.0)) for one in coming]
        gaps = [
            later - earlier
            for one in going
            for earlier, later in zip(one.trace.tokens, one.trace.tokens[1:])
            if any(start <= earlier and later <= end for start, end in busy)
        ]
        ttft = statistics.median(one.trace.ttft or 0.0 for one in coming)
        return ttft, statistics.fmean(gaps) if gaps else 0.0

    def _request(self, streams: int, known: Serving) -> float:
        """Seconds that streams wait longer for a prompt that comes into one of their steps than that step takes."""
        rows = PROMPTS[0]
        decode, mixed = decodes(streams, SHORT + NEW / 2), among(decodes(streams, SHORT + NEW / 2), rows)
        alone = self.cost.seconds(decode) + known.added(decode, 0)
        more = self.cost.seconds(mixed) + known.added(mixed, 1) - alone
        going, coming = self._among(streams, rows, AMONG, 2 * self.cost.seconds(mixed))
        start, end = coming[0].trace.arrived, max(one.trace.arrived + (one.trace.ttft or 0.0) for one in coming)
        waited = []
        for one in going:
            tokens = [token for token in one.trace.tokens if start <= token <= end]
            if len(tokens) > 1:  # steps that came with a prompt are among those of both
                share = (tokens[-1] - tokens[0]) / (end - start)
                waited.append(tokens[-1] - tokens[0] - (len(tokens) - 1) * alone - share * len(coming) * more)
        return statistics.median(waited) / len(coming) if waited else 0.0

    def _among(
        self, streams: int, rows: int, n: int, apart: float
    ) -> tuple[Sequence[ServedRequest], Sequence[ServedRequest]]:
        """Streams that go on, and so many prompts that come meanwhile, so many seconds apart."""
        tokens = round((n + 2) * (apart + self.cost.seconds(prompt(rows))) / self._alone(streams))
        first = streams * self.cost.seconds(prompt(SHORT)) + 20 * self._alone(streams)
        going = [Shot(0.0, self.prompts(SHORT), NEW + tokens) for _ in range(streams)]
        coming = [Shot(first + apart * i, self.prompts(rows), 1) for i in range(n)]
        served = self.ask([*going, *coming])
        return served[:streams], served[streams:]


def among(step: StepWork, rows: int) -> StepWork:
    """A step of decodes, and a whole prompt with it."""
    alone = prompt(rows)
    return replace(alone, decode_rows=step.decode_rows, context=step.context, emits=step.emits + 1)


def rising(found: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """The line a + b n through (n, seconds, weight), seconds being the more uncertain the larger the weight; neither
    part below zero."""
    import numpy

    n, seconds, weight = (numpy.array(column, dtype=float) for column in zip(*found, strict=True))

    def off(a: float, b: float) -> float:
        return float((((a + b * n - seconds) / weight) ** 2).sum())

    both = numpy.linalg.lstsq(numpy.stack([1 / weight, n / weight], 1), seconds / weight, rcond=None)[0]
    flat = float((seconds / weight**2).sum() / (1 / weight**2).sum())
    steep = float((n * seconds / weight**2).sum() / (n**2 / weight**2).sum())
    tried = [(float(both[0]), float(both[1])), (flat, 0.0), (0.0, steep), (0.0, 0.0)]
    return min((one for one in tried if min(one) >= 0.0), key=lambda one: off(*one))
