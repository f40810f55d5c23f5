"""Chooses where training computes (CUDA where there is some, else the CPU) and brings the data of its steps there.

Batches are made by Python on the CPU. Beside a GPU that would wait for them, other processes make them ahead: what a
step sees is a function of its number alone, so who makes it changes nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from phasewise.load import usable
from phasewise.train.mixture import Stage

MAKERS = 2  # processes that make batches beside a GPU, at most
AHEAD = 2  # batches that each of them has ready

Batch = TypeVar("Batch")
Batch_co = TypeVar("Batch_co", covariant=True)


class Data(Protocol[Batch_co]):
    """The data of each step: a pure function of the step number, so that a resumed run is the same run."""

    def step(self, step: int, stage: Stage) -> Batch_co: ...


def device() -> torch.device:
    """The device that models are trained on."""
    return usable("cuda" if torch.cuda.is_available() else "cpu")


def halved(device: torch.device) -> torch.autocast:
    """Products in bfloat16 where that is the faster one, else in float32. Weights and optimisers are float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=computes_in_bfloat16(device.type))


@cache
def computes_in_bfloat16(device: str) -> bool:
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:  # not Linux: float32 is never wrong
        return False
    # Intel's AVX-512 has bfloat16 at half the pace of float32 (163 to 313 GFLOPS of two cores); its AMX is the fast one
    quick = {"amx_bf16", "bf16"} | ({"avx512_bf16"} if "AuthenticAMD" in words else set())  # bf16 is ARM's
    return not words.isdisjoint(quick)


def moved(batch: Any, to: torch.device) -> Any:
    """The same batch, of tensors in tuples, lists and data classes, with every tensor on that device."""
    if isinstance(batch, Tensor):
        return batch.to(to)
    if isinstance(batch, tuple):
        parts = [moved(part, to) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [moved(part, to) for part in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = (field.name for field in dataclasses.fields(batch))
        return dataclasses.replace(batch, **{name: moved(getattr(batch, name), to) for name in fields})
    return batch


def batches(data: Data[Batch], stages: Sequence[Stage], start: int, to: torch.device) -> Iterator[Batch]:
    """The batches of steps `start`, `start` + 1 ..., each in its stage, on that device."""
    if to.type == "cpu":
        for step in range(start, len(stages)):
            yield data.step(step, stages[step])
        return
    for batch in made_ahead(data, stages, start, max(1, min(MAKERS, (os.cpu_count() or 1) // 2))):
        yield moved(batch, to)


def made_ahead(data: Data[Batch], stages: Sequence[Stage], start: int, makers: int) -> Iterator[Batch]:
    """The same on the CPU, made by so many other processes."""
    steps = range(start, len(stages))
    yield from DataLoader(_Steps(data, stages), batch_size=None, sampler=steps, num_workers=makers,
                          prefetch_factor=AHEAD, collate_fn=_as_it_is)  # fmt: skip


class _Steps(Dataset[Any]):
    def __init__(self, data: Data[Any], stages: Sequence[Stage]) -> None:
        self.data, self.stages = data, stages

    def __getitem__(self, step: int) -> Any:
        return self.data.step(step, self.stages[step])


def _as_it_is(batch: Any) -> Any:
    return batch
