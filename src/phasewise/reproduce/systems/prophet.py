"""Prophet: a block is finished at once when the two best logits of its masks lie far apart."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import HOT, SHORT
from phasewise.reproduce.play import LoadEntry
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Quality, Saving, Setting, System, Timing
from phasewise.reproduce.workload import PromptSource

BLOCK, PROMPT, COUNT = 8, 17, 4  # rows of a block, of the prompt, and blocks to write


def blocks_of(selector: str) -> Setting:
    return Setting({"decode": f"block_diffusion:block={BLOCK},selector={selector}"})


def lone(asked: PromptSource) -> list[LoadEntry]:
    """One request, whose first block to write holds the rest of its prompt."""
    return [LoadEntry(asked.code(PROMPT), BLOCK * COUNT - PROMPT % BLOCK)]


def several(asked: PromptSource) -> list[LoadEntry]:
    return [LoadEntry(asked.code(33), asked.size(63, 15)) for _ in range(4)]


STATIC = blocks_of("static")
NEVER, AT_ONCE = blocks_of("(prophet:early=1e9,middle=1e9,late=1e9)"), blocks_of("(prophet:early=-1,middle=-1,late=-1)")


def never(lab: Lab) -> AttemptOutcome:
    """Thresholds that no gap reaches."""
    entries = lone(lab.asked("pocket"))
    same = lab.play(NEVER, entries, "pocket").outs == lab.play(STATIC, entries, "pocket").outs
    return AttemptOutcome(same, "the same tokens" if same else "other tokens")


SYSTEM = System(
    title="Prophet",
    paper=Paper("Diffusion Language Models Know the Answer Before Decoding", "2508.19982"),
    claim="a masked model knows most answers long before its last step: finishing all once the gap of the two best "
    "logits is large takes up to 3.4 times fewer steps at the same quality.",
    conditions=("LLaDA-8B and Dream-7B", "256 steps for 256 tokens", "the gap is watched at the answer's own tokens"),
    method=blocks_of("prophet"),
    baseline=STATIC,
    control=blocks_of(f"sequential,steps={BLOCK // 4}"),
    control_is="four tokens per pass from the left, however far apart the logits are",
    line="a block is finished once logits lie apart: up to 3.4 times fewer steps, equal quality",
    promises=("answers", "cost", "time"),
    load=several,
    missing=("a model trained for masks: none is shipped", "the span of the answer, which is watched alone"),
    counters=(
        Counter("passes where no gap is large enough", "those of static decoding: one per mask, and the prompt's",
                lambda case: case.work.forwards, lambda case: case.entries[0].new + 1, load=lone, who=NEVER),
        Counter("passes where every gap is large enough", "one per block, and the prompt's",
                lambda case: case.work.forwards, lambda case: COUNT + 1, load=lone, who=AT_ONCE),
        Counter("passes", "those of static decoding", lambda case: case.work.forwards,
                lambda case: case.entries[0].new + 1, bound="at most", load=lone),
    ),
    savings=(Saving("passes", lambda case, run: run.work.forwards, "baseline", 1.5),),
    quality=(Quality(SHORT, 0.05, 40), Quality(SHORT, 0.05, 40, temperature=HOT)),
    attempts=(Attempt("exact", "thresholds that no gap reaches", "static decoding's tokens", never),),
    timings=(Timing("time per token, all requests", 1.0, loads.per_token),),
    note="The weights were not trained for masks, so answers say little; counters and the two limits say what it does.",
)  # fmt: skip
