"""SnapKV: the end of a prompt votes on which of its rows stay."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.controls import RandomRows
from phasewise.reproduce.system import Case, Counter, Paper, Quality, Saving, Setting, System, Timing

KEEP, WINDOW, NEW = 0.25, 32, 32


def stay(case: Case) -> int:
    """Rows per head that stay of the prompt."""
    return max(int(KEEP * loads.prompt_rows(case)), WINDOW)


SYSTEM = System(
    title="SnapKV",
    paper=Paper("SnapKV: LLM Knows What You are Looking for Before Generation", "2404.14469"),
    claim="a small share of a prompt's KV, chosen per head by the attention of the prompt's end, answers as well as "
    "all of it: 3.6 times faster decoding and 8.2 times less memory at 16K tokens.",
    conditions=("LWM-Text-Chat-1M, Mistral-7B and others on one A100", "LongBench, needle in a haystack up to 380K",
                "the question stands at the end of the prompt"),
    method=Setting({"evict": f"snapkv:keep={KEEP},window={WINDOW}"}),
    baseline=Setting(),
    control=Setting(objects={"evict": RandomRows(KEEP, WINDOW)}),
    control_is="as many rows per head and the same window, the others drawn at random",
    load=loads.lone(768, NEW),
    missing=("questions that come after the prompt was cut",),
    counters=(
        Counter("KV bytes held while decoding", "(keep x prompt + decoded rows) x bytes of a row",
                lambda case: case.method.steps[-2].kv, lambda case: (stay(case) + NEW - 2) * case.row_bytes),
        Counter("KV bytes read while decoding", "sum of keep x prompt + j rows over the decoded tokens",
                lambda case: sum(step.read for step in case.method.decoding),
                lambda case: sum(stay(case) + j for j in range(1, NEW)) * case.row_bytes),
    ),
    savings=(Saving("KV bytes held before the last token", lambda case, run: run.steps[-2].kv, "baseline", 2.5),),
    quality=Quality(("recall@1k", "passkey@1k"), allowed=0.1, examples=60),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
)  # fmt: skip
