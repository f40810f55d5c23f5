"""Numbers for Prometheus: latencies of requests that have left, the engine's counters, queue lengths and KV bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from phasewise.adapters import AGAIN
from phasewise.engine.lora import Lora
from phasewise.recipes import DEFAULT
from phasewise.serve.loop import OutputStream, Snapshot

SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Histogram:
    """Counts per bucket; seconds. Plain lists, since one request may bring thousands of latencies."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float | None) -> None:
        """None (there is no such latency) is not counted."""
        if seconds is not None:
            self.counts[bisect_left(self.bounds, seconds)] += 1
            self.sum += seconds

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """(upper edge, how many are below it)."""
        return list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts)))


class Tally:
    """Counters and latencies of the requests of one recipe. Latencies begin when the server had read the request, as
    the client sees them."""

    def __init__(self) -> None:
        self.ways: Counter[str] = Counter()  # requests that have left, by how
        self.accepted = 0
        self.prompt_tokens = 0
        self.output_tokens = 0  # of requests that have left
        self.ttft, self.tpot, self.itl = Histogram(LONG), Histogram(SHORT), Histogram(SHORT)
        self.e2e, self.queued, self.handoff = Histogram(LONG), Histogram(LONG), Histogram(LONG)

    def left(self, feed: OutputStream) -> None:
        """A request has left; its latencies and its way out are counted."""
        assert feed.left is not None and feed.trace is not None
        finished = feed.left.how == "finished"
        self.ways[feed.left.reason if finished else feed.left.how] += 1
        trace = feed.trace
        self.output_tokens += sum(trace.counts)
        if trace.tokens:
            self.ttft.observe(trace.tokens[0] - feed.arrived)
        if trace.admitted is not None:
            self.queued.observe(trace.admitted - feed.arrived)
        self.tpot.observe(trace.tpot)
        self.handoff.observe(trace.handoff)
        for gap in trace.itl:
            self.itl.observe(gap)
        if finished and trace.left is not None:
            self.e2e.observe(trace.left - feed.arrived)


HISTOGRAMS = (
    ("ttft", "phasewise_time_to_first_token_seconds", "Arrival to first token"),
    ("tpot", "phasewise_time_per_output_token_seconds", "Mean per request, after the first"),
    ("itl", "phasewise_inter_token_latency_seconds", "Gaps between emissions"),
    ("e2e", "phasewise_request_seconds", "Arrival to end of each request"),
    ("queued", "phasewise_queue_seconds", "Arrival to admission"),
    ("handoff", "phasewise_handoff_seconds", "Prompt done to its KV taken over by a worker"),
)
TOTALS = (
    ("accepted", "phasewise_requests_accepted", "Requests, each sample one"),
    ("prompt_tokens", "phasewise_prompt_tokens", "Prompt tokens accepted"),
    ("output_tokens", "phasewise_output_tokens", "Output tokens of requests that have left"),
)


class Metrics(Collector):
    """The metrics of `/metrics`. Where there are recipes, what is counted of requests has a label `recipe`: its name,
    or "default" for requests that name none."""

    def __init__(self, kv_limit: int, recipes: Sequence[str] = (), loras: Mapping[str, Lora] | None = None) -> None:
        self.kv_limit, self._loras = kv_limit, {} if loras is None else loras
        self.snapshot = Snapshot()
        self.errors: Counter[int] = Counter()  # HTTP errors by status
        self.tallies = {name: Tally() for name in ("", *recipes)}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def took(self, recipe: str, requests: int, prompt_tokens: int) -> None:
        """The engine has accepted so many requests."""
        tally = self._tally(recipe)
        tally.accepted += requests
        tally.prompt_tokens += prompt_tokens

    def left(self, feed: OutputStream) -> None:
        """A request has left."""
        self._tally(feed.request.recipe).left(feed)

    def _tally(self, recipe: str) -> Tally:
        """The tally of a recipe by its name, however often its methods have changed."""
        return self.tallies.setdefault(recipe.partition(AGAIN)[0], Tally())

    def render(self, snapshot: Snapshot) -> bytes:
        """The exposition text."""
        self.snapshot = snapshot
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        now = self.snapshot
        yield from self._of_requests()
        errors = CounterMetricFamily("phasewise_http_errors", "Error responses, by status", labels=["status"])
        yield _labelled(errors, self.errors)
        for name, value in now.counters.items():
            yield CounterMetricFamily(f"phasewise_{name}", f"The engine's counter `{name}`", value)
        if len(self.tallies) > 1:
            yield from _apart("recipe", _by_name(now.by_recipe))
        yield from _apart("role", now.by_role)
        workers = GaugeMetricFamily("phasewise_workers", "Workers that are alive and ready, by role", labels=["role"])
        yield _labelled(workers, now.workers)
        yield GaugeMetricFamily("phasewise_requests_waiting", "Requests not admitted yet", now.waiting)
        yield GaugeMetricFamily("phasewise_requests_running", "Requests that hold KV", now.running)
        live = now.kv_bytes - now.prefix_bytes
        yield GaugeMetricFamily("phasewise_kv_live_bytes", "KV bytes of requests", live)
        yield GaugeMetricFamily("phasewise_kv_prefix_bytes", "KV bytes of the prefix cache", now.prefix_bytes)
        for name, number in now.tiers.items():
            kind = GaugeMetricFamily if name.endswith("_held") else CounterMetricFamily
            yield kind(f"phasewise_kv_{name}", f"Of KV below the budget: `{name}` (docs/kv.md)", number)
        ranks = GaugeMetricFamily("phasewise_lora_rank", "Adapters that are loaded: the rank of each", labels=["lora"])
        yield _labelled(ranks, {name: lora.rank for name, lora in self._loras.items()})
        yield GaugeMetricFamily("phasewise_lora_bytes", "The part of the KV budget that adapters take", now.lora_bytes)
        yield GaugeMetricFamily("phasewise_kv_limit_bytes", "The KV budget, prefix cache included", self.kv_limit)

    def _of_requests(self) -> Iterator[Metric]:
        """Metrics that every recipe has; without a label where there is only one recipe."""
        label = ["recipe"] if len(self.tallies) > 1 else []
        tallies = [([name or DEFAULT] if label else [], tally) for name, tally in self.tallies.items()]
        for field, name, help in HISTOGRAMS:
            histogram = HistogramMetricFamily(name, help, labels=label)
            for values, tally in tallies:
                histogram.add_metric(values, getattr(tally, field).buckets, getattr(tally, field).sum)
            yield histogram
        for field, name, help in TOTALS:
            total = CounterMetricFamily(name, help, labels=label)
            for values, tally in tallies:
                total.add_metric(values, getattr(tally, field))
            yield total
        requests = CounterMetricFamily("phasewise_requests", "Requests that have left, by how", labels=["how", *label])
        for values, tally in tallies:
            for how, count in tally.ways.items():
                requests.add_metric([how, *values], count)
        yield requests


def _by_name(counts: Mapping[str, Mapping[str, int]]) -> dict[str, Counter[str]]:
    """Counters of recipes by the names that clients know."""
    found: dict[str, Counter[str]] = {}
    for recipe, own in counts.items():
        found.setdefault(recipe.partition(AGAIN)[0] or DEFAULT, Counter()).update(own)
    return found


def _apart(label: str, counts: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    """A metric per counter, with this label."""
    for name in next(iter(counts.values()), {}):
        total = CounterMetricFamily(
            f"phasewise_{label}_{name}", f"The engine's counter `{name}`, by {label}", labels=[label]
        )
        for value, own in counts.items():
            total.add_metric([value], own[name])
        yield total


def _labelled(family: CounterMetricFamily | GaugeMetricFamily, counts: Mapping[str, int] | Mapping[int, int]) -> Metric:
    for value, count in counts.items():
        family.add_metric([str(value)], count)
    return family
