"""Counts how many requests decode at once within a fixed KV budget, and how many tokens a second they make.

That is what saved bytes are for. Prompts are computed first, without the prefix cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.request.params import Params
from phasewise.request.request import Request


@dataclass(frozen=True)
class FullBatch:
    """`most`: the most requests that decoded in one step; `preemptions`: how often one was preempted; `seconds`: of a
    step in which so many decoded and no prompt was read, the median; None if there was no such step."""

    most: int
    preemptions: int
    seconds: float | None

    @property
    def tokens_per_s(self) -> float | None:
        return None if not self.seconds else self.most / self.seconds


@torch.inference_mode()
def _step(engine: Engine, requests: Sequence[Request]) -> tuple[int, float] | None:
    """One step of the engine: how many requests got tokens, and its seconds; None where it held somebody's first."""
    before = [request.n_out for request in requests]
    began = time.perf_counter()
    engine.step()
    took = time.perf_counter() - began
    had = [had for request, had in zip(requests, before, strict=True) if request.n_out > had]
    return None if 0 in had else (len(had), took)


def fitting(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> FullBatch:
    """Offers all prompts at once, each followed by `new` tokens. Raises UserError if a request fails."""
    requests = [Request(prompt, Params(max_tokens=new, ignore_eos=True)) for prompt in prompts]
    for request in requests:
        engine.add(request)
    most, steps = 0, list[tuple[int, float]]()
    while any(request.left is None for request in requests):
        if (step := _step(engine, requests)) is not None:
            steps.append(step)
        most = max(most, sum(one.left is None and one.n_out > 0 and one.kv is not None for one in requests))
    bad = next((one.left for one in requests if one.left is not None and one.left.how != "finished"), None)
    if bad is not None:
        raise UserError(f"a request failed: {bad.reason}")
    full = [took for count, took in steps if count == most]
    return FullBatch(most, engine.counters.preemptions, statistics.median(full) if full else None)
