"""Flover: requests join the running batch between two steps, and leave it as soon as they are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from phasewise.reproduce import loads
from phasewise.reproduce.controls import Control
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import PromptSource
from phasewise.verbs.schedule import Work
from phasewise.verbs.traits import Traits

LATE, PARTS, TOKENS, PROMPT = 7, 24, 96, 32  # requests that come later, each a part of one later; tokens of both kinds


@dataclass(frozen=True)
class StaticBatch(Control):
    """schedule: whoever is there forms a batch, and others wait until all of it is done."""

    traits: ClassVar[Traits] = Traits("schedule")

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        decoding = [job for job in live if not job.prefilling]
        return [Work(job, job.rows) for job in decoding or live]


def staggered(asked: PromptSource) -> list[LoadEntry]:
    """Requests as long as one another, each of which comes some tokens after the one before."""
    new = asked.size(TOKENS, 24)
    apart = max(1, new // PARTS)
    return [LoadEntry(asked.code(PROMPT), new, after=number * apart) for number in range(1 + LATE)]


def steps(case: Case, run: PlayedRun) -> float:
    """Passes of the model until everybody is done."""
    return run.work.forwards


def alone(case: Case) -> int:
    """One pass for each token of all requests."""
    return sum(entry.new for entry in case.entries)


def fused(case: Case) -> int:
    """The tokens from the first request's arrival to the last one's end, and a pass for each prompt on the way."""
    return max(entry.after + entry.new for entry in case.entries) + len(case.entries)


SYSTEM = System(
    title="Flover",
    paper=Paper("Flover: A Temporal Fusion Framework for Efficient Autoregressive Model Parallel Inference",
                "2305.13484"),
    claim="requests at different steps of their answers share every pass: up to 11 times (GPT) and 16 times (LLaMA) "
    "the speed of FasterTransformer, which runs requests one after another.",
    conditions=("GPT-J and LLaMA on A100", "requests of 512 tokens that come 0.5 to 1 second apart",
                "rows of finished requests are filled by the last live ones"),
    method=Setting({"schedule": "prefill_first"}),
    baseline=Setting(most=1),
    control=Setting(objects={"schedule": StaticBatch()}),
    control_is="a static batch: whoever is there when one begins is in it, and the others wait until all of it is done",
    line="requests join and leave the batch between steps: 11 to 16 times as fast as one after another",
    promises=("cost", "time"),
    load=staggered,
    exact=True,
    missing=("tensor parallel workers", "rows moved into the place of finished ones: rows lie apart here"),
    counters=(
        Counter("passes of requests one after another", "one for each token",
                lambda case: case.runs["baseline"].work.forwards, alone),
        Counter("passes of requests that share them", "tokens from the first arrival to the last end, and the prompts'",
                lambda case: case.work.forwards, fused, bound="at most"),
    ),
    savings=(
        Saving("passes until everybody is done", steps, "baseline", 2.0),
        Saving("passes until everybody is done", steps, "control", 1.1),
    ),
    timings=(
        Timing("time per token, all requests", 1.0, loads.per_token),
        Timing("time per token, all requests", 1.0, loads.per_token, against="control"),
    ),
)  # fmt: skip
