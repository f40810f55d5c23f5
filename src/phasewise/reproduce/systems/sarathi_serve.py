"""Sarathi-Serve: no stream waits for a prompt, and no step is longer than its budget."""

from __future__ import annotations

from phasewise.bench.workloads import lengths
from phasewise.plan.arrivals import Load
from phasewise.plan.setting import ServerSetting, known
from phasewise.plan.shape import DecoderShape
from phasewise.plan.simulate import capacity
from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import PromptSource

BUDGET, CHUNK, CHUNKS = 128, 16, 8
CHUNKED = Setting({"schedule": f"sarathi:budget={CHUNK}"})
MISTRAL = DecoderShape(32, 4096, 32, 8, 128, 14336, 32000)  # sizes of Mistral-7B
DATA = {  # medians of the paper's data sets
    "chats": "lognormal:prompt=1730,spread=0.9,longest=8192,new=415,new_spread=0.5,new_longest=2048",
    "papers": "lognormal:prompt=7059,spread=0.5,longest=16384,new=208,new_spread=0.5,new_longest=1024",
}
STRICT, RELAXED = 0.1, 0.5  # seconds of P99 TBT
BUDGETS = {STRICT: 512, RELAXED: 2048}  # the paper's chunks
RIVALS = ("prefill_first", f"sarathi:budget={1 << 30}")  # as vLLM, and as Orca: whole prompts, first or beside decodes
UP_TO = 2.6  # times the rivals' capacity, the paper's best for this model


def worked(asked: PromptSource) -> list[LoadEntry]:
    """The card's trace: three streams, then prompts of 13 and 4 tokens."""
    return [LoadEntry(asked.random(2), 12) for _ in range(3)] + [
        LoadEntry(asked.random(n), 4, after=2) for n in (13, 4)
    ]


def capacities(requests: int, seed: int) -> dict[tuple[str, float], tuple[float, ...]]:
    """The capacity within each target on one A100 by its device file, requests/s: Sarathi-Serve's, then the rivals'."""
    source, found = known({"": "a100"}, 1, MISTRAL), {}
    for data, text in DATA.items():
        load = Load(lengths(text), requests, seed=seed)
        for tbt, budget in BUDGETS.items():
            settings = [ServerSetting(schedule, max_running=128, prefix_cache=False)
                        for schedule in (f"sarathi:budget={budget}", *RIVALS)]  # fmt: skip
            made = [setting.scenario(source, 1, (), seed) for setting in settings]
            found[data, tbt] = tuple(capacity(one, load, tbt, precision=0.03).rate for one in made)
    return found


def carries(lab: Lab) -> AttemptOutcome:
    """The capacity of Mistral-7B's sizes on one A100, by simulation of these schedulers."""
    found = capacities(200 if lab.scale.quick else 1000, lab.scale.seed)
    ratios = {case: own / max(rivals) if max(rivals) else float("inf") for case, (own, *rivals) in found.items()}
    said = "; ".join(
        f"{data}, {1e3 * tbt:g} ms: {own:.2f} against {first:.2f} and {beside:.2f} ({ratios[data, tbt]:.2f} times)"
        for (data, tbt), (own, first, beside) in found.items()
    )
    return AttemptOutcome(min(ratios.values()) > 1 and max(ratios.values()) >= UP_TO, f"{said} requests/s")


SYSTEM = System(
    title="Sarathi-Serve",
    paper=Paper("Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", "2403.02310"),
    claim="chunked prompts beside decodes, within a token budget, bound the time between tokens whatever the prompts: "
    "a whole prompt in the batch stretches an iteration up to 28.3 times; capacity within a P99 target rises up to "
    "2.6 times (Mistral-7B), 3.7 times (Yi-34B) and 5.6 times (Falcon-180B) over vLLM and Orca.",
    conditions=("A100 and A40 GPUs", "models of 7B to 180B", "openchat_sharegpt4 and arxiv_summarization"),
    method=Setting({"schedule": f"sarathi:budget={BUDGET}"}),
    baseline=Setting({"schedule": "prefill_first"}),
    control=Setting({"schedule": f"sarathi:budget={1 << 30}"}),
    control_is="whole prompts beside the decodes (the paper's ablation without chunks): stalls as long as the prompts",
    line="chunks beside decodes bound the time between tokens: capacity within a P99 target up to 5.6 times",
    promises=("cost", "time"),
    load=loads.streams_and_prompts(1024, 1024),
    exact=True,
    missing=("bubbles of pipelines, for there are none",),
    counters=(
        Counter("rows of a step at most", "the budget",
                lambda case: max(step.rows for step in case.method.steps), lambda case: BUDGET, bound="at most"),
        Counter("streams that missed a step", "0", loads.paused, lambda case: 0),
        Counter("rows of the steps of the worked trace", "3 decodes + 5; 3 + 5; 3 + 3 + 2; 4 + 2; 5, at budget 8",
                lambda case: tuple(step.rows for step in case.method.steps[2:7]), lambda case: (8, 8, 8, 6, 5),
                load=worked, who=Setting({"schedule": "sarathi:budget=8"})),
        Counter("KV bytes read by a prompt in chunks", "c N (N + 1) / 2 rows, for N chunks of c",
                lambda case: case.work.kv_bytes_read,
                lambda case: CHUNK * CHUNKS * (CHUNKS + 1) // 2 * case.row_bytes,
                load=loads.lone(CHUNK * CHUNKS, 1), who=CHUNKED),
    ),
    savings=(
        Saving("rows run between two tokens of a stream, at most", lambda case, run: run.stall(), "baseline", 1.5),
        Saving("rows run between two tokens of a stream, at most", lambda case, run: run.stall(), "control", 1.5),
    ),
    attempts=(
        Attempt("cost", "capacity within a P99 TBT target (Mistral-7B's sizes on A100, simulated), against prompts "
                "first and whole prompts beside decodes", f"more under every target, {UP_TO} times or more at best",
                carries),
    ),
    timings=(
        Timing("longest time between two tokens of a stream", 1.0, loads.longest_gap),
        Timing("time to the first token of the prompts that come", seconds=loads.late_first, price=True),
    ),
    note="The clock is that of a model of 7 million weights, whose steps have a fixed part that no budget shortens.",
)  # fmt: skip
