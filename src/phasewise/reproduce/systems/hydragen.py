"""Hydragen: what requests have in common is read once for all of them."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.play import Entry, Run
from phasewise.reproduce.system import Case, Counter, Load, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import Asked

BATCH, OWN = 16, 32


def family(prefix: int, common: bool = True) -> Load:
    """Requests whose prompts begin alike, or, without anything in common, as long ones."""

    def load(asked: Asked) -> list[Entry]:
        length = asked.size(prefix, 128)
        shared = asked.code(length)
        beginnings = [shared if common else asked.code(length) for _ in range(BATCH)]
        return [
            Entry(beginning + asked.code(OWN), asked.size(64, 16), shared=length * common) for beginning in beginnings
        ]

    return load


def read(case: Case) -> int:
    """Bytes, in steps in which everybody decodes."""
    return sum(step.read for step in case.method.decoding)


def traffic(case: Case) -> int:
    """P + sum of what is each request's own, per step."""
    steps, shared = len(case.method.decoding), case.entries[0].shared
    return sum(shared + BATCH * (OWN + j) for j in range(1, steps + 1)) * case.row_bytes


def per_token(case: Case, run: Run) -> float:
    return run.work.kv_bytes_read / run.work.emitted


ON = Setting({"attend": "hydragen"}, prefix_cache=True)

SYSTEM = System(
    title="Hydragen",
    paper=Paper("Hydragen: High-Throughput LLM Inference with Shared Prefixes", "2402.05099"),
    claim="attention over a shared prefix is one matrix product for the whole batch, so that its KV is read once: up "
    "to 32 times the throughput of the best baseline; going from 1K to 16K shared tokens costs less than 15 %.",
    conditions=("CodeLlama-13B on eight A100", "large batches (up to 1,024) and long prefixes",
                "the shared part is stored once, which is what makes the batch large"),
    method=ON,
    baseline=Setting(prefix_cache=True),
    control=Setting(ON.verbs, prefix_cache=True, load=family(1024, common=False)),
    control_is="the same method where prompts are as long and have nothing in common: there is nothing to save",
    load=family(1024),
    exact=True,
    missing=("memory: each request keeps a copy of the shared part, so batches are not larger",
             "prefixes of 16K tokens, beyond the model's context"),
    counters=(
        Counter("KV bytes read while all decode", "P + sum of S rows per step, instead of B P + sum of S", read,
                traffic),
    ),
    savings=(
        Saving("KV bytes read per token", per_token, "baseline", 3.0),
        Saving("KV bytes read per token", per_token, "control", 3.0),
    ),
    timings=(Timing("time per token, all requests", 1.0, loads.per_token),),
)  # fmt: skip
