"""TokenSelect: all heads of a layer vote on which rows it reads."""

from __future__ import annotations

from random import Random

from phasewise.bench.stats import shares
from phasewise.reproduce import loads
from phasewise.reproduce.answers import right
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import Entry, Run
from phasewise.reproduce.selected import RandomTokens
from phasewise.reproduce.system import Attempt, Case, Counter, Paper, Quality, Saving, Setting, System, Timing, Tried
from phasewise.reproduce.workload import code_ids

K, FIRST, LOCAL, DENSE, NEW = 96, 8, 24, 1, 40
MOST = FIRST + K + LOCAL
KNOBS = f"k={K},first={FIRST},local={LOCAL},dense_layers={DENSE}"
THETA = 0.9
ANEW = Setting({"attend": f"token_select:{KNOBS}"})
AGAIN = Setting({"attend": f"token_select:{KNOBS},theta={THETA}"})
TASKS, EXAMPLES = ("recall@1k", "passkey@1k"), 60
STRETCH, SAID = 512, 64  # tokens of a stretch of code, and of what follows


def read(case: Case, run: Run) -> int:
    """KV bytes of the decoded tokens."""
    return sum(step.read for step in run.decoding)


def closed(case: Case) -> int:
    """The listed rows, a key of every row that is ranked, and the keys that are turned back, each once: all that there
    are, whenever one of them is ranked for the first time."""
    layers, prompt = case.config.layers, loads.prompt_rows(case)
    key = case.row_bytes // layers // 2  # bytes of a row's keys in a layer
    total = turned = 0
    for n in range(prompt + 1, prompt + NEW):  # rows that a token sees, itself included
        missing = n - 1 - turned if turned < n - LOCAL else 0
        total += DENSE * n * 2 * key + (layers - DENSE) * key * (2 * MOST + n - FIRST - LOCAL + missing)
        turned += missing
    return total


def used_again(lab: Lab) -> Tried:
    """Lists made for what follows four stretches of code, and the bytes read for it, with and without a threshold."""
    rng, ids = Random(f"{lab.scale.seed} again"), list(code_ids())
    starts = [rng.randrange(len(ids) - STRETCH) for _ in range(1 if lab.scale.quick else 4)]
    entries = [Entry(ids[start : start + STRETCH], 8 if lab.scale.quick else SAID) for start in starts]
    anew, again = (lab.play(setting, entries, "pocket") for setting in (ANEW, AGAIN))
    made = again.work.choices / anew.work.choices
    saved = 1 - sum(step.read for step in again.decoding) / sum(step.read for step in anew.decoding)
    return Tried(made < 1, f"{made:.1%} of them are made anew, {saved:.1%} fewer bytes are read")


def answers_stay(lab: Lab) -> Tried:
    """As many right answers as where every row chooses anew."""
    n = min(lab.scale.examples or EXAMPLES, 4 if lab.scale.quick else EXAMPLES)
    again, anew = ([g for task in TASKS for g in right(lab, each, task, n)] for each in (AGAIN, ANEW))
    gain = shares(again, anew)
    return Tried(gain.low > -0.1, gain.text(True))


SYSTEM = System(
    title="TokenSelect",
    paper=Paper("TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via Dynamic "
                "Token-Level KV Cache Selection", "2411.02886"),
    claim="one list of rows per layer, by soft votes of all heads, keeps answers: attention is up to 23.84 times, the "
    "whole 2.28 times as fast, and texts may be longer than the model was trained for.",
    conditions=("models of billions of weights on A100", "InfiniteBench, RULER, LongBench",
                "lists are used again while queries are alike; prompts choose in chunks of 512"),
    method=ANEW,
    baseline=Setting(),
    control=Setting(objects={"attend": RandomTokens(FIRST, LOCAL, float(MOST), DENSE)}),
    control_is="as many rows, first and last ones among them, the others drawn at random per head",
    load=loads.lone(768, NEW),
    missing=("prompts that choose", "texts beyond the trained length"),
    counters=(
        Counter("KV bytes read while decoding",
                "first + k + local rows + an unrotated key of every row that is ranked + keys turned back, once",
                lambda case: read(case, case.method), closed),
    ),
    savings=(Saving("KV bytes read while decoding", read, "baseline", 1.1),),
    quality=Quality(TASKS, allowed=0.1, examples=EXAMPLES),
    attempts=(
        Attempt("claim", f"lists of layers after stretches of code, theta={THETA} against none", "fewer are made",
                used_again),
        Attempt("quality", f"right answers, theta={THETA} less none", "all of it above -10 points", answers_stay),
    ),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
)  # fmt: skip
