"""A step's cost on a device known by its data sheet: arithmetic or memory, whichever takes longer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from phasewise.errors import UserError
from phasewise.plan.cost import Price, StepWork, counts
from phasewise.plan.device import Device
from phasewise.plan.shape import DecoderShape

MEMORY_POWER = 0.5  # of full power above idle while memory alone is busy: capping a GPU to half costs decode next to
# nothing (arXiv 2311.18677)


@dataclass(frozen=True)
class Roofline:
    """A model on devices of a kind: `ways` share every layer (tensor parallelism), and each of `stages` such groups
    has an equal part of the layers (pipeline parallelism). `seconds` are those of a step through all stages; `price` is
    of all devices, each as long as the step is with it."""

    device: Device
    shape: DecoderShape
    ways: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1 or self.shape.layers % self.stages:
            raise UserError(f"stages={self.stages} does not divide {self.shape.layers} layers: choose a divisor")
        if self._weight_bytes >= self.device.memory:
            need, many = self.shape.weight_bytes // self.device.memory + 1, self.ways * self.stages
            raise UserError(
                f"the weights take {self._weight_bytes / 1e9:.1f} GB on each of {many} {self.device.name}, "
                f"which have {self.device.memory / 1e9:.1f} GB: share them among at least {need:.0f}"
            )

    @property
    def _weight_bytes(self) -> float:
        """Bytes of weights on one device."""
        return self.part.weight_bytes / self.stages

    @cached_property
    def part(self) -> DecoderShape:
        """The part of the model that each device computes, as if it had all the layers."""
        return self.shape.split(self.ways)

    @property
    def kv_bytes(self) -> float:
        """KV memory of all devices together, bytes."""
        one = self.device.kv_memory or self.device.memory - self._weight_bytes
        return one * self.ways * self.stages

    def seconds(self, step: StepWork) -> float:
        return self._times(step)[0]

    def price(self, step: StepWork) -> Price:
        device = self.device
        seconds, compute, memory = self._times(step)
        busy = min(1.0, (compute + MEMORY_POWER * max(0.0, memory - compute)) / seconds) if seconds else 0.0
        watts = device.idle + (device.power - device.idle) * busy if device.power else 0.0
        return Price(seconds, watts * seconds * self.ways, device.price / 3600 * seconds * self.ways)

    def _times(self, step: StepWork) -> tuple[float, float, float]:
        """Seconds of a step, and of its arithmetic and its memory traffic alone."""
        device, tile = self.device, int(self.device.tile)
        if step.prefill_rows and tile > 1:
            step = replace(step, prefill_rows=-(-step.prefill_rows // tile) * tile)
        need = counts(step, self.part)
        rate = device.bandwidth * device.bandwidth_share
        kv = need.kv_read_bytes + need.kv_written_bytes
        compute = need.flops / (device.flops * device.flops_share)
        if device.kv_bandwidth:
            memory = need.weight_bytes / rate + kv / device.kv_bandwidth
        else:
            memory = (need.weight_bytes + kv) / rate
        between = self._exchange(step) + self._pass_on(step)
        return max(compute, memory) + device.overhead * self.stages + between, compute, memory

    def _exchange(self, step: StepWork) -> float:
        """Two sums over all ways per layer, each around a ring of them."""
        if self.ways == 1:
            return 0.0
        sent = 2 * (self.ways - 1) / self.ways * step.rows * self.shape.hidden * self.shape.width
        each = sent / self.device.link if self.device.link else 0.0
        return 2 * self.shape.layers * (each + self.device.latency) * step.share

    def _pass_on(self, step: StepWork) -> float:
        """Rows go from stage to stage, each of the ways sending its part."""
        if self.stages == 1:
            return 0.0
        sent = step.rows * self.shape.hidden * self.shape.width / self.ways
        return (self.stages - 1) * ((sent / self.device.link if self.device.link else 0.0) + self.device.latency)
