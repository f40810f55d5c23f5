"""EAGLE-3: a block that goes on with the model's own states, trained over its own outputs, and EAGLE-2's tree."""

from __future__ import annotations

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.eagle import Eagle
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads, sampled
from phasewise.reproduce.drafting_heads import (
    COLLAPSED,
    DEPTH,
    FLAT,
    LOAD,
    NODES,
    PASSES,
    TIMINGS,
    FixedTree,
    flat,
    guessing,
    passes,
    unrolled_and_not,
    verified,
)
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Attempt, AttemptOutcome, Paper, Saving, Setting, System, Timing

WIDTH = 4
HOT = sampled.writing(1.0)
TREE = f"depth={DEPTH},width={WIDTH},nodes={NODES}"
RIVALS = {
    "MTP's module, trained as long on the same texts": Setting({"draft": f"mtp:{TREE}"}, most=1),
    "Hydra's heads, trained as long on the same texts": Setting({"draft": f"hydra:nodes={NODES}"}, most=1),
    "Medusa's heads, trained as long on the same texts": Setting({"draft": f"medusa:nodes={NODES}"}, most=1),
    "as many guesses without training": Setting({"draft": f"token_recycling:nodes={NODES}"}, most=1),
}


def drafting(heads: str = "auto") -> Setting:
    return Setting({"draft": f"eagle:heads={heads},{TREE}"}, most=1)


def grown_and_fixed(lab: Lab) -> AttemptOutcome:
    """Passes per token with a tree that follows what the heads hold likely, and with one of the same ranks in every
    pass, over held-out code."""
    eagle = Eagle(depth=DEPTH, width=WIDTH, nodes=NODES)
    fixed = Setting(objects={"decode": Speculative(FixedTree(eagle), Match())}, most=1)
    found = []
    for setting in (drafting(), fixed):
        case = lab.case({"method": setting}, sampled.writing(0.0), "pocket", "float32")
        found.append(passes(case, case.method))
    return AttemptOutcome(found[0] < found[1], f"{found[0]:.4f} against {found[1]:.4f}")


SYSTEM = System(
    title="EAGLE",
    paper=Paper("EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
                "2503.01840"),
    claim="a block that goes on with states of three layers, trained over its own outputs, is right as often at every "
    "depth, where one that has not met them falls: up to 6.5 times as fast, 1.4 times EAGLE-2, whose tree follows "
    "likely guesses.",
    conditions=("a tree of 60 guesses, depth 7", "Vicuna 13B, Llama 3 8B and 70B, fp16, one request at a time",
                "trained on the model's own answers to ShareGPT and UltraChat"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="heads of the same shape with random weights, as many guesses",
    line="a block trained over its own outputs is right as often at every depth: up to 6.5 times as fast",
    promises=("cost", "time"),
    load=LOAD,
    rivals=RIVALS,
    exact=True,
    counters=(PASSES, verified(NODES), guessing(DEPTH)),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "rivals", 1.0),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token at T=1", passes, "baseline", 1.1, load=HOT),
        Saving("passes per token at T=1", passes, "rivals", 1.0, load=HOT),
        Saving("passes per token at T=1", passes, "control", 1.05, load=HOT),
    ),
    attempts=(
        Attempt("mechanism", "guesses that are right where those before them were, by depth, of the heads that ship",
                f"later ones at least {FLAT} times as often as the first", flat),
        Attempt("mechanism", "guesses that are right where those before them were, by depth, of heads that learned "
                "over their own outputs and of heads that learned from true states alone",
                f"of the former later ones at least {FLAT} times as often as the first; of the latter the second at "
                f"most {COLLAPSED} times", unrolled_and_not),
        Attempt("mechanism", "passes per token of code, EAGLE-2's tree against a fixed one of as many nodes", "less",
                grown_and_fixed),
    ),
    timings=(
        *TIMINGS,
        Timing("time per token at T=1, the model padded to sixteen times the weights", 1.0, loads.pace,
               load=sampled.few(1.0), model="pocket-wide"),
    ),
    note="One block with one key head and an MLP half as wide as the model, and 2,048 of its 4,096 tokens to "
    "guess among. A tree of 7 guesses, 4 in a row: rows cost time on a CPU.",
)  # fmt: skip
