"""Compress KV Heads: the heads of a trained model are joined by the directions that their caches use."""

from __future__ import annotations

from dataclasses import replace

from phasewise.bench.stats import means, shares
from phasewise.reproduce import loads
from phasewise.reproduce.answers import losses, right
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.models import RECOVERED
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Counter,
    KnobRatio,
    Paper,
    Quality,
    Setting,
    System,
    Timing,
)

JOINED, NEW = 2, 32  # heads that became one; tokens
EXAMPLES, WINDOW = 48, 256
TASKS = ("copy", "json", "recall@256")
CACHES, WEIGHTS, MEAN = (Setting(model=f"pocket-1kv-{by}") for by in ("caches", "weights", "mean"))
TAUGHT, MEAN_TAUGHT = (Setting(model=f"{who.model}-taught") for who in (CACHES, MEAN))
BEFORE, AFTER = "before training", f"after {RECOVERED:,} tokens of training for both"


def last(run: PlayedRun) -> int:
    """KV bytes before the last token."""
    return run.steps[-2].kv


def words(other: Setting) -> str:
    return "the directions of the weights" if other == WEIGHTS else "averaged heads"


def on_tasks(other: Setting, method: Setting = CACHES, when: str = BEFORE) -> Attempt:
    """Right answers of heads joined by their caches, less those of heads joined in another way."""

    def run(lab: Lab) -> AttemptOutcome:
        n = lab.scale.examples or (6 if lab.scale.quick else EXAMPLES)
        ours, theirs = ([g for task in TASKS for g in right(lab, who, task, n)] for who in (method, other))
        lead = shares(ours, theirs)
        return AttemptOutcome(lead.low > 0, f"{lead.text(True)} of {lead.n} ({', '.join(TASKS)})")

    return Attempt(
        "control",
        f"right answers {when}, less those of {words(other)}",
        "all of it above 0",
        run,
        "answers",
        "pocket",
    )


def on_code(other: Setting, method: Setting = CACHES, when: str = BEFORE) -> Attempt:
    """Code loss: what the caches use, against another way to choose directions."""

    def run(lab: Lab) -> AttemptOutcome:
        code = Quality(("code",), 0.0, EXAMPLES, window=WINDOW)
        n = lab.scale.examples or (6 if lab.scale.quick else EXAMPLES)
        ours, theirs = (losses(lab, setting, code, n) for setting in (method, other))
        lead = means(ours, theirs)
        return AttemptOutcome(lead.low > 0, f"{lead.text(False)} per token of {n} stretches of code")

    what = f"likelihood of code {when}, less that of {words(other)}"
    return Attempt("control", what, "all of it above 0", run, "answers", "pocket")


ON = Setting(model="pocket-1kv")
SYSTEM = System(
    title="Compress KV Heads",
    paper=Paper("Effectively Compress KV Heads for LLM", "2406.07056"),
    claim="the singular vectors of cached keys and values join KV heads better than averaging them; after some "
    "training 3/4 of the heads can go at comparable performance.",
    conditions=("BLOOMZ-7B1, LLaMA2-7B and 13B", "a small text sample, then low-rank training",
                "heads of multi-head attention, 2 or 4 joined to one"),
    method=ON,
    baseline=Setting(),
    control=MEAN,
    control_is="the same two heads averaged. They are held against heads joined by their caches before anything is "
    "trained, and after both have learned the same tokens; the directions of the weights alone before",
    line="KV heads joined by their caches' directions, better than averaged ones: 3/4 of them can go",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("keys joined in more directions than commute with their rotation",),
    counters=(
        Counter("KV bytes held before the last token",
                "(prompt + decoded rows) x bytes of a row / heads that became one",
                lambda case: last(case.method),
                lambda case: (loads.prompt_rows(case) + NEW - 2) * case.row_bytes // JOINED),
        Counter("KV bytes read while decoding", "sum of prompt + j rows over the decoded tokens, each / heads that "
                "became one", lambda case: sum(step.read for step in case.method.decoding),
                lambda case: sum(loads.prompt_rows(case) + j for j in range(1, NEW)) * case.row_bytes // JOINED),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: last(run)),),
    quality=tuple(replace(each, alone=True) for each in long_texts(always(ON), always(MEAN), stranger=False)),
    attempts=(on_code(MEAN), on_tasks(MEAN), on_code(WEIGHTS), on_tasks(WEIGHTS),
              on_code(MEAN_TAUGHT, TAUGHT, AFTER), on_tasks(MEAN_TAUGHT, TAUGHT, AFTER)),
    timings=(Timing("time per token, 16 requests at 1,536 tokens", 1.0, seconds=loads.pace,
                    load=loads.together(16, 1536, 64)),),
    note="pocket-1kv was trained on half a million tokens after its heads were joined, as `phasewise convert kv_heads` "
    "does. Keys are joined by one complex number per rotary pair, which commutes with the rotation: the paper's own "
    "way with rotary positions is not known.",
)  # fmt: skip
