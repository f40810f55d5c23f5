"""SDAR's decoding: blocks denoised over an exact cache; no converted model is shipped."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import HOT, SHORT
from phasewise.reproduce.play import LoadEntry
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Load,
    Paper,
    Quality,
    Saving,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.workload import PromptSource

BLOCK = 4
STATIC = Setting({"decode": f"block_diffusion:block={BLOCK},selector=static"})


def blocks(prompt: int, count: int) -> Load:
    """A prompt, and `count` blocks to write, the first of which holds the rest of the prompt."""
    return lambda asked: [LoadEntry(asked.code(prompt), BLOCK * count - prompt % BLOCK)]


def masks(case: Case) -> int:
    return case.entries[0].new


def shifted(lab: Lab) -> AttemptOutcome:
    """Blocks of one row, each predicting the next token: plain decoding."""
    entries = loads.lone(48, 32)(lab.asked("pocket"))
    one = lab.play(Setting({"decode": "block_diffusion:block=1,shift=true"}), entries, "pocket")
    plain = lab.play(Setting(), entries, "pocket")
    same = one.outs == plain.outs
    return AttemptOutcome(same, "the same tokens" if same else "other tokens")


def several(asked: PromptSource) -> list[LoadEntry]:
    return [LoadEntry(asked.code(33), asked.size(63, 15)) for _ in range(4)]


SYSTEM = System(
    title="SDAR (decoding)",
    paper=Paper("SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation", "2510.06303"),
    claim="an autoregressive model converted to block diffusion keeps its quality and writes several tokens per pass: "
    "dynamic decoding takes less than half of the passes of static decoding at a negligible loss (30B-A3B), 2.3 times "
    "faster on the clock.",
    conditions=("SDAR-1.7B to 30B-A3B, converted with 50B tokens", "block 4", "H200, few requests at a time"),
    method=Setting({"decode": f"block_diffusion:block={BLOCK},selector=dynamic"}),
    baseline=STATIC,
    control=Setting({"decode": f"block_diffusion:block={BLOCK},selector=sequential,steps={BLOCK // 2}"}),
    control_is="two tokens per pass from the left, however sure the model is",
    line="blocks denoised with confidence: less than half of the passes at a negligible loss, 2.3 times as fast",
    promises=("answers", "cost", "time"),
    load=several,
    missing=("a model converted to block diffusion: none is shipped",),
    counters=(
        Counter("passes of static decoding",
                "the prompt's, and one per mask: each block is stored with the next one's first",
                lambda case: case.work.forwards, lambda case: masks(case) + 1, load=blocks(9, 5), who=STATIC),
        Counter("passes of static decoding, stored apart", "one per mask, one per stored block, and the prompt's",
                lambda case: case.work.forwards, lambda case: masks(case) + 4 + 1, load=blocks(9, 5),
                who=Setting({"decode": f"block_diffusion:block={BLOCK},selector=static,fuse=false"})),
        Counter("passes of dynamic decoding", "one per mask and the prompt's", lambda case: case.work.forwards,
                lambda case: masks(case) + 1, bound="at most", load=blocks(9, 5)),
        Counter("passes of dynamic decoding", "one per block", lambda case: case.work.forwards, lambda case: 5,
                bound="at least", load=blocks(9, 5)),
    ),
    savings=(Saving("passes", lambda case, run: run.work.forwards, "baseline", 2.0),),
    quality=(
        Quality(SHORT, 0.05, 40, baseline=Setting()),
        Quality(SHORT, 0.05, 40, temperature=HOT, baseline=Setting()),
    ),
    attempts=(Attempt("exact", "blocks of one shifted row", "plain decoding's tokens", shifted),),
    timings=(Timing("time per token, all requests", 1.0, loads.per_token),),
    note="Answers are compared with plain greedy decoding of the same weights, which were not trained for masks.",
)  # fmt: skip
