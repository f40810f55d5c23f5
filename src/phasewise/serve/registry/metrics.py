"""Metrics of a registry: loads and memory by model, and the metrics of every loaded model with its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from phasewise.serve.registry.registry import ModelRegistry

STATES = ("unloaded", "loading", "ready")


class RegistryMetrics(Collector):
    """What `/metrics` shows. Series of a model's own begin anew whenever it is loaded."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._models = registry
        self.errors: Counter[int] = Counter()  # HTTP errors that no model has answered, by status
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    async def render(self) -> bytes:
        """The exposition text."""
        for slot in self._models.slots.values():
            if slot.service is not None:
                slot.service.metrics.snapshot = await slot.service.engine.snapshot()
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._of_loads()
        limit = "Bytes that weights and KV budgets of all loaded models may take"
        yield GaugeMetricFamily("phasewise_models_limit_bytes", limit, self._models.limit)
        merged: dict[str, Metric] = {}
        errors = CounterMetricFamily("phasewise_http_errors", "Error responses, by status", labels=["status"])
        for status, count in self.errors.items():
            errors.add_metric([str(status)], count)
        merged[errors.name] = errors
        for name, slot in self._models.slots.items():
            for family in () if slot.service is None else slot.service.metrics.collect():
                whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [sample._replace(labels={**sample.labels, "model": name}) for sample in family.samples]
        yield from merged.values()

    def _of_loads(self) -> Iterator[Metric]:
        label = ["model"]
        state = GaugeMetricFamily("phasewise_model_state", "1 for the state a model is in", labels=["model", "state"])
        taken = GaugeMetricFamily("phasewise_model_bytes", "Bytes set aside for weights and KV", labels=label)
        loads = CounterMetricFamily("phasewise_model_loads", "Loads that succeeded", labels=label)
        failures = CounterMetricFamily("phasewise_model_load_failures", "Loads that failed", labels=label)
        seconds = CounterMetricFamily("phasewise_model_load_seconds", "Time of loads that succeeded", labels=label)
        evictions = CounterMetricFamily(
            "phasewise_model_evictions", "Models unloaded, by why: idle, memory, failed", labels=["model", "why"]
        )
        for name, slot in self._models.slots.items():
            for each in STATES:
                state.add_metric([name, each], int(slot.state == each))
            taken.add_metric([name], slot.bytes)
            loads.add_metric([name], slot.loads)
            failures.add_metric([name], slot.failures)
            seconds.add_metric([name], slot.load_seconds)
            for why, count in slot.evictions.items():
                evictions.add_metric([name, why], count)
        yield from (state, taken, loads, failures, seconds, evictions)
