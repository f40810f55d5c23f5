"""Expected Attention: rows stay that later queries are expected to attend to."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.controls import RandomRows
from phasewise.reproduce.conversations import compared
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


def stay(case: Case) -> int:
    """Rows per head that stay of the prompt."""
    return int(KEEP * loads.prompt_rows(case))


ON = Setting({"evict": f"expected_attention:keep={KEEP}"})
SNAPKV = Setting({"evict": f"snapkv:keep={KEEP},window={WINDOW}"})
ANY = Setting(objects={"evict": RandomRows(KEEP, WINDOW)})


def asked_later(lab: Lab) -> AttemptOutcome:
    """Second questions about a text, of which the rows were chosen when the first one was asked."""
    return compared(lab, ON, {"SnapKV": SNAPKV}, {"dense": Setting(), "random rows": ANY})


SYSTEM = System(
    title="Expected Attention",
    paper=Paper("Expected Attention: KV Cache Compression by Estimating Attention from Future Queries", "2510.00636"),
    claim="a closed form of the attention that later queries will pay ranks rows better than what past queries paid: "
    "with a share of the KV removed, answers are better than with SnapKV's choice, whatever is asked later; the peak "
    "of memory falls by up to 15 GB for contexts of 120k tokens.",
    conditions=("Llama-3.1-8B, Qwen3-8B and Gemma3-12B", "LongBench, Ruler and needles", "the question comes later"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many rows per head and the last ones among them, the others drawn at random",
    line="rows kept by expected attention: better answers than SnapKV's, whatever is asked later",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("queries of the whole prompt: the last 256 stand for them", "compressing again while decoding"),
    counters=(
        Counter("KV bytes held while decoding", "(keep x prompt + decoded rows) x bytes of a row",
                lambda case: case.method.steps[-2].kv, lambda case: (stay(case) + NEW - 2) * case.row_bytes),
        Counter("KV bytes read while decoding", "sum of keep x prompt + j rows over the decoded tokens",
                lambda case: sum(step.read for step in case.method.decoding),
                lambda case: sum(stay(case) + j for j in range(1, NEW)) * case.row_bytes),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: run.steps[-2].kv),),
    quality=long_texts(always(ON), always(ANY), rivals={"SnapKV": always(SNAPKV)}, points=None),
    attempts=(
        Attempt("answers", "second question about the same 1,000 tokens, less SnapKV", "all of it above 0", asked_later,
                model="pocket"),
    ),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
)  # fmt: skip
