"""DFlash: a block of guesses in one pass of a few layers, over states of the model's own."""

from __future__ import annotations

from phasewise.reproduce import loads, sampled
from phasewise.reproduce.drafting_heads import LOAD, PASSES, TIMINGS, guessing, passes, verified
from phasewise.reproduce.system import Paper, Saving, Setting, System, Timing

BLOCK = 7  # guesses of a pass, and of each rival's tree
TREE = f"depth=4,width=4,nodes={BLOCK}"
HOT = sampled.writing(1.0)
EAGLE = Setting({"draft": f"eagle:{TREE}"}, most=1)
RIVALS = {
    "EAGLE-3's heads, trained as long on the same texts": EAGLE,
    "Medusa's heads, trained as long on the same texts": Setting({"draft": f"medusa:nodes={BLOCK}"}, most=1),
    "as many guesses without training": Setting({"draft": f"token_recycling:nodes={BLOCK}"}, most=1),
}


def drafting(heads: str = "auto") -> Setting:
    return Setting({"draft": f"dflash:heads={heads},depth={BLOCK}"}, most=1)


SYSTEM = System(
    title="DFlash",
    paper=Paper("DFlash: Block Diffusion for Flash Speculative Decoding", "2602.06036"),
    claim="a few layers fill a block of masks in one pass, given states of the model they draft for: over 6 times as "
    "fast as plain decoding, up to 2.5 times as fast as EAGLE-3, which drafts one token after the other.",
    conditions=("Qwen3 4B and 8B, Qwen3-Coder 30B, on GPUs", "blocks of 16 guesses by five layers",
                "EAGLE-3 with 7 guesses in a row, and with trees of 16 and 60"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="heads of the same shape with random weights, as many guesses",
    line="a block of guesses in one pass, over the model's states: over 6 times as fast, 2.5 times EAGLE-3",
    promises=("cost", "time"),
    load=LOAD,
    rivals=RIVALS,
    exact=True,
    counters=(PASSES, verified(BLOCK), guessing(1)),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "rivals", 1.0),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token at T=1", passes, "baseline", 1.1, load=HOT),
        Saving("passes per token at T=1", passes, "rivals", 1.0, load=HOT),
    ),
    timings=(
        *TIMINGS,
        Timing("time per token, the model padded to sixteen times the weights, against EAGLE-3's heads", 1.0,
               loads.pace, model="pocket-wide", against="EAGLE-3", settings={"EAGLE-3": EAGLE}),
    ),
    note="Two layers and 7 masks. EAGLE-3's heads take four passes for a tree of as many guesses.",
)  # fmt: skip
