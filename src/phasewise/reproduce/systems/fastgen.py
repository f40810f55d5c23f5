"""DeepSpeed-FastGen: Dynamic SplitFuse, steps of exactly the same size."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.controls import OneChunk
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import PromptSource

BUDGET = 128


def worked(asked: PromptSource) -> list[LoadEntry]:
    """The card's trace: three streams, then prompts of 10, 7 and 20 tokens."""
    return [LoadEntry(asked.random(2), 12) for _ in range(3)] + [
        LoadEntry(asked.random(n), 6, after=2) for n in (10, 7, 20)
    ]


def unfilled(case: Case, run: PlayedRun) -> float:
    """Rows that a step had room for and somebody wanted, over all steps."""
    return sum(max(0, min(BUDGET, step.wanted) - step.rows) for step in run.steps)


SYSTEM = System(
    title="DeepSpeed-FastGen (Dynamic SplitFuse)",
    paper=Paper("DeepSpeed-FastGen: High-throughput Text Generation for LLMs via MII and DeepSpeed-Inference",
                "2401.08671"),
    claim="long prompts are split and short ones fused, so that every forward pass has the size at which the hardware "
    "is saturated: up to 2.3 times the throughput of vLLM, and a P95 token latency 3.7 times lower.",
    conditions=("Llama-2-70B on four A100", "prompts of 1,200 and 2,600 tokens, answers of 60 and 128",
                "against a vLLM that ran prompts first"),
    method=Setting({"schedule": f"splitfuse:budget={BUDGET}"}),
    baseline=Setting({"schedule": "prefill_first"}),
    control=Setting(objects={"schedule": OneChunk(BUDGET)}),
    control_is="one chunk of one prompt per step, however short it is: steps are not full although prompts wait",
    line="steps of one size: 2.3 times the throughput, 3.7 times less token latency than prompts first",
    promises=("time",),
    load=loads.streams_and_prompts(700, *[40] * 10, 300, least=40),
    exact=True,
    missing=("throughput at a target per request on a saturated machine", "captured graphs of a fixed shape"),
    counters=(
        Counter("rows missing in steps that could have been full", "0: min(budget, rows wanted) in every step",
                lambda case: unfilled(case, case.method), lambda case: 0),
        Counter("rows of the steps of the worked trace", "3 + 10 + 3; 4 + 4 + 8; 5 + 11; 5 + 1; 6, at budget 16",
                lambda case: tuple(step.rows for step in case.method.steps[2:7]), lambda case: (16, 16, 16, 6, 6),
                load=worked, who=Setting({"schedule": "splitfuse:budget=16"})),
        Counter("streams that missed a step", "0", loads.paused, lambda case: 0),
    ),
    arithmetic=(KnobRatio("rows run between two tokens of a stream, at most", lambda case, run: run.stall()),),
    savings=(
        Saving("rows missing in steps that could have been full", unfilled, "control"),
        Saving("steps until everybody is done", lambda case, run: len(run.steps), "control", 1.0),
    ),
    timings=(
        Timing("longest time between two tokens of a stream", 1.0, loads.longest_gap),
        Timing("time per token, all requests", seconds=loads.per_token, against="control", price=True),
    ),
)  # fmt: skip
