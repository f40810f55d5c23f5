"""PyramidKV: early layers keep more of a prompt, late ones less, and as much together."""

from __future__ import annotations

from phasewise.methods.evict._allot import Spread
from phasewise.reproduce import loads
from phasewise.reproduce.controls import RandomRows
from phasewise.reproduce.system import Case, Counter, Paper, Quality, Saving, Setting, System, Timing

KEEP, WINDOW, BETA, NEW = 0.125, 32, 20.0, 32
KNOBS = f"keep={KEEP},window={WINDOW}"


def stay(case: Case) -> int:
    """Rows per head that stay of the prompt in a mean layer."""
    return max(int(KEEP * loads.prompt_rows(case)), WINDOW)


SYSTEM = System(
    title="PyramidKV",
    paper=Paper("PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", "2406.02069"),
    claim="with budgets that fall from layer to layer, 12 % of the KV answers LongBench as well as all of it, and at "
    "0.7 % accuracy on TREC is up to 20.5 points above methods that give all layers the same.",
    conditions=("LLaMA-3-8B and 70B, Mistral-7B", "LongBench, needle in a haystack at 8K",
                "budgets of 64 to 2,048 rows"),
    method=Setting({"evict": f"snapkv:{KNOBS},layers=pyramid,beta={BETA}"}),
    baseline=Setting(),
    control=Setting(objects={"evict": RandomRows(KEEP, WINDOW, spread=Spread("pyramid", beta=BETA))}),
    control_is="as many rows in each layer and the same window, the others drawn at random per head",
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes held while decoding", "(keep x prompt + decoded rows) x bytes of a row: the mean is exact",
                lambda case: case.method.steps[-2].kv, lambda case: (stay(case) + NEW - 2) * case.row_bytes),
        Counter("KV bytes read while decoding", "sum of keep x prompt + j rows over the decoded tokens",
                lambda case: sum(step.read for step in case.method.decoding),
                lambda case: sum(stay(case) + j for j in range(1, NEW)) * case.row_bytes),
    ),
    savings=(Saving("KV bytes held before the last token", lambda case, run: run.steps[-2].kv, "baseline", 4.0),),
    quality=Quality(("recall@1k", "passkey@1k"), allowed=0.05, examples=60,
                    baseline=Setting({"evict": f"snapkv:{KNOBS}"})),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
    note="answers are held against SnapKV's with the same budget in all layers, memory and time against all rows",
)  # fmt: skip
