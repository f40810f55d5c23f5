"""AdaKV: the heads of a layer compete for its budget of rows."""

from __future__ import annotations

from phasewise.methods.evict._allot import Spread
from phasewise.reproduce import loads
from phasewise.reproduce.controls import RandomRows
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

KEEP, WINDOW, LEAST, NEW = 0.125, 32, 0.2, 32
KNOBS = f"keep={KEEP},window={WINDOW}"


def stay(case: Case) -> int:
    """Rows that stay of the prompt in a mean head."""
    return max(int(KEEP * loads.prompt_rows(case)), WINDOW)


ON = Setting({"evict": f"snapkv:{KNOBS},heads=ada,least={LEAST}"})
SNAPKV = Setting({"evict": f"snapkv:{KNOBS}"})
ANY = Setting(objects={"evict": RandomRows(KEEP, WINDOW, spread=Spread(heads="ada", least=LEAST))})
SYSTEM = System(
    title="AdaKV",
    paper=Paper("Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
                "2407.11550"),
    claim="the same rows shared out by what heads score, none below a fifth of the mean, answer better than equal "
    "budgets: over SnapKV 81.8 becomes 88.1 on RULER with a quarter of the KV cut (kvpress, Llama-3.1-8B).",
    conditions=("Mistral-7B, LLaMA-3.1-8B", "RULER and LongBench", "on top of SnapKV and PyramidKV"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many rows in each layer and the same window, the others drawn at random over all its heads",
    line="the same rows, shared out among heads: better answers than SnapKV's equal budgets",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes held while decoding", "(keep x prompt + decoded rows) x bytes of a row: the sum is exact",
                lambda case: case.method.steps[-2].kv, lambda case: (stay(case) + NEW - 2) * case.row_bytes),
        Counter("KV bytes read while decoding", "sum of keep x prompt + j rows over the decoded tokens",
                lambda case: sum(step.read for step in case.method.decoding),
                lambda case: sum(stay(case) + j for j in range(1, NEW)) * case.row_bytes),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: run.steps[-2].kv),),
    quality=long_texts(always(ON), always(ANY), rivals={"SnapKV": always(SNAPKV)}, points=None),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
    note="Answers must be better than SnapKV's with the same budget in all heads. Memory and time are held against all "
    "rows.",
)  # fmt: skip
