"""PyramidKV: early layers keep more of a prompt, late ones less, and as much together."""

from __future__ import annotations

from phasewise.methods.evict._allot import Spread
from phasewise.reproduce import loads
from phasewise.reproduce.controls import RandomRows
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

KEEP, WINDOW, BETA, NEW = 0.125, 32, 20.0, 32
LESS = 0.04  # where the paper gains most: 48 of 8,192 rows and more
KNOBS = f"keep={KEEP},window={WINDOW}"


def stay(case: Case) -> int:
    """Rows per head that stay of the prompt in a mean layer."""
    return max(int(KEEP * loads.prompt_rows(case)), WINDOW)


ON = Setting({"evict": f"snapkv:{KNOBS},layers=pyramid,beta={BETA}"})
ANY = Setting(objects={"evict": RandomRows(KEEP, WINDOW, spread=Spread("pyramid", beta=BETA))})
SCARCE = f"keep={LESS},window={WINDOW // 2}"
FEW = Setting({"evict": f"snapkv:{SCARCE},layers=pyramid,beta={BETA}"})
ANY_FEW = Setting(objects={"evict": RandomRows(LESS, WINDOW // 2, spread=Spread("pyramid", beta=BETA))})
SNAPKV = Setting({"evict": f"snapkv:{SCARCE}"})
SYSTEM = System(
    title="PyramidKV",
    paper=Paper("PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", "2406.02069"),
    claim="with budgets that fall from layer to layer, 12 % of the KV answers LongBench as well as all of it, and at "
    "0.7 % accuracy on TREC is up to 20.5 points above methods that give all layers the same.",
    conditions=("LLaMA-3-8B and 70B, Mistral-7B", "LongBench, needle in a haystack at 8K",
                "budgets of 64 to 2,048 rows"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many rows in each layer and the same window, the others drawn at random per head",
    line="budgets that fall by layer: 12 % of the KV answers as all, better than equal budgets where few rows stay",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes held while decoding", "(keep x prompt + decoded rows) x bytes of a row: the mean is exact",
                lambda case: case.method.steps[-2].kv, lambda case: (stay(case) + NEW - 2) * case.row_bytes),
        Counter("KV bytes read while decoding", "sum of keep x prompt + j rows over the decoded tokens",
                lambda case: sum(step.read for step in case.method.decoding),
                lambda case: sum(stay(case) + j for j in range(1, NEW)) * case.row_bytes),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: run.steps[-2].kv),),
    quality=(
        *long_texts(always(ON), always(ANY)),
        *long_texts(always(FEW), always(ANY_FEW), rivals={"SnapKV": always(SNAPKV)}, points=None),
    ),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
    note="At 12.5 % of the rows answers must be kept. At 4 % they must be better than SnapKV's with the same budget in "
    "all layers.",
)  # fmt: skip
