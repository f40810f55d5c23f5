"""Lookahead decoding: n-grams that the model itself has begun to write further on are guessed."""

from __future__ import annotations

from phasewise.reproduce import loads, stranger
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import PromptSource

W, N, G = 7, 5, 7


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


def writing(asked: PromptSource) -> list[LoadEntry]:
    """Held-out code to go on with, far enough for a window to fill."""
    return [LoadEntry(asked.code(64), asked.size(96, 32)) for _ in range(asked.size(16, 4))]


SYSTEM = System(
    title="Lookahead decoding",
    paper=Paper("Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", "2402.02057"),
    claim="n-grams from parallel Jacobi iterations, verified in the pass that goes on with these, make generation 1.5 "
    "to 2.3 times as fast without a second model or a datastore; on Spec-Bench 1.64 tokens a pass (7B, A100).",
    conditions=("LLaMA-2 and CodeLlama, 7B to 34B, MT-Bench, GSM8K, HumanEval", "one request at a time, fp16, greedy",
                "idle compute: 56 to 120 rows a pass where there was one"),
    method=Setting({"draft": f"lookahead:window={W},n={N},guesses={G}"}, most=1),
    baseline=Setting(most=1),
    control=Setting({"draft": f"lookahead:window=0,n={N},guesses={G}"}, most=1),
    control_is="the same pool without the window: n-grams of the prompt alone",
    line="n-grams from Jacobi iterations: 1.5 to 2.3 times as fast without a second model",
    promises=("cost", "time"),
    load=writing,
    exact=True,
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("rows of the head", "one per prompt, and every row of the other passes: one pass judges and "
                "reads the window", lambda case: case.work.head_rows,
                lambda case: case.work.rows - loads.prompt_rows(case) + len(case.entries)),
        Counter("rows after the prompts", f"(N - 1) (W + G) = {(N - 1) * (W + G)} a pass",
                lambda case: case.work.rows - loads.prompt_rows(case),
                lambda case: (N - 1) * (W + G) * (case.work.forwards - len(case.entries)), bound="at most"),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        stranger.saved(passes, 1.5),
        Saving("passes per token", passes, "control", 1.2),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
        stranger.FASTER,
    ),
    note="An n-gram that is right throughout brings one token more than in the authors' code, which does not count the "
    "token after it. A processor has little compute to spare: the clock says what dozens of rows a pass cost here.",
)  # fmt: skip
