"""Medusa: heads on the model's last state, each for one later token, and a sparse tree of their guesses."""

from __future__ import annotations

from phasewise.reproduce import sampled
from phasewise.reproduce.drafting_heads import FREE, LOAD, NODES, PASSES, TIMINGS, passes, verified
from phasewise.reproduce.system import Paper, Saving, Setting, System


def drafting(heads: str = "auto", nodes: int = NODES, **verbs: str) -> Setting:
    return Setting({"draft": f"medusa:heads={heads},nodes={nodes}", **verbs}, most=1)


SYSTEM = System(
    title="Medusa",
    paper=Paper("Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", "2401.10774"),
    claim="heads trained on the frozen model's last state guess several tokens at once; with a sparse tree of 63 "
    "guesses they make greedy answers over 2.2 times as fast (Medusa-1, Vicuna-7B, one request at a time).",
    conditions=("five heads, a tree of 63 guesses made of measured accuracies", "Vicuna 7B and 13B in fp16",
                "typical acceptance where tokens are drawn"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="heads of the same shape with random weights, as many guesses",
    line="heads on the last state guess several tokens in no pass: over 2.2 times as fast",
    promises=("cost", "time"),
    load=LOAD,
    rivals={"as many guesses without training": Setting({"draft": f"token_recycling:nodes={NODES}"}, most=1)},
    exact=True,
    counters=(PASSES, verified(NODES), FREE),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "rivals", 1.0),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token at T=0.7, typical acceptance against the model's own distribution", passes, "baseline",
               1.02, load=sampled.writing(0.7),
               settings={"method": drafting(verify="typical"), "baseline": drafting(verify="match")}),
    ),
    timings=TIMINGS,
    note="Four heads that share the model's output matrix, and a tree of 7 guesses: rows cost time on a CPU. "
    "Medusa-2, which tunes the model as well, is not here.",
)  # fmt: skip
