"""SnapKV: the end of a prompt votes on which of its rows stay."""

from __future__ import annotations

from phasewise.bench.stats import means
from phasewise.reproduce import batches, loads
from phasewise.reproduce.answers import right
from phasewise.reproduce.controls import RandomRows
from phasewise.reproduce.conversations import number, seconds
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    KnobRatio,
    Paper,
    Setting,
    System,
    Timing,
)

KEEP, WINDOW, NEW = 0.25, 32, 32
LARGER = 1.5  # times as many requests in the same bytes
ON = Setting({"evict": f"snapkv:keep={KEEP},window={WINDOW}"})
ANY = Setting(objects={"evict": RandomRows(KEEP, WINDOW)})


def stay(case: Case) -> int:
    """Rows per head that stay of the prompt."""
    return max(int(KEEP * loads.prompt_rows(case)), WINDOW)


def hidden(lab: Lab) -> AttemptOutcome:
    """The lead over random rows where the prompt ends with the question, and where it comes when they are chosen."""
    n = number(lab)
    last = [right(lab, each, "recall@1k", n) for each in (ON, ANY)]
    later = [seconds(lab, each, n) for each in (ON, ANY)]
    leads = [[mine - other for mine, other in zip(*found)] for found in (last, later)]
    shrunk = means(*leads)
    said = ", ".join(f"{sum(mine) / n:.0%} against {sum(other) / n:.0%}" for mine, other in (last, later))
    return AttemptOutcome(shrunk.low > 0, f"{shrunk.text(True)} (asked last and later: {said}, of {n})")


SYSTEM = System(
    title="SnapKV",
    paper=Paper("SnapKV: LLM Knows What You are Looking for Before Generation", "2404.14469"),
    claim="a small share of a prompt's KV, chosen per head by the attention of the prompt's end, answers as well as "
    "all of it: 3.6 times faster decoding and 8.2 times less memory at 16K tokens.",
    conditions=("LWM-Text-Chat-1M, Mistral-7B and others on one A100", "LongBench, needle in a haystack up to 380K",
                "the question stands at the end of the prompt"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many rows per head and the same window, the others drawn at random",
    line="rows by the prompt's end: answers of all, 3.6 times as fast at 16K",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes held while decoding", "(keep x prompt + decoded rows) x bytes of a row",
                lambda case: case.method.steps[-2].kv, lambda case: (stay(case) + NEW - 2) * case.row_bytes),
        Counter("KV bytes read while decoding", "sum of keep x prompt + j rows over the decoded tokens",
                lambda case: sum(step.read for step in case.method.decoding),
                lambda case: sum(stay(case) + j for j in range(1, NEW)) * case.row_bytes),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: run.steps[-2].kv),),
    quality=long_texts(always(ON), always(ANY)),
    attempts=(
        Attempt("control", "lead over random rows, asked last less asked after rows were chosen", "all of it above 0",
                hidden, "mechanism"),
        *batches.attempts(ON, LARGER),
    ),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
)  # fmt: skip
