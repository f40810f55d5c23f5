"""ZipVL in mixed precision: each layer of a prompt attends to important tokens alone, and keeps the others in fewer
bits."""

from __future__ import annotations

from phasewise.methods.store.zipvl import MixedZipVL
from phasewise.reproduce import loads
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.shuffled import RandomMixed
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System, Timing

TAU, WINDOW, GAP, NEW = 0.9, 32, 100, 32
HIGH, LOW = 4, 2  # bits
METHOD = MixedZipVL(TAU, WINDOW, queries="all", gap=GAP)
ON = Setting({"store": f"zipvl:tau={TAU},window={WINDOW},queries=all,high={HIGH},low={LOW},gap={GAP}"})
DROPPED = Setting({"evict": f"zipvl:tau={TAU},window={WINDOW},queries=all"})


def held(run: PlayedRun) -> int:
    """KV bytes before the last token."""
    return run.steps[-2].kv


def in_bits(case: Case, upper: int) -> int:
    """Bytes before the last token if every block had so many rows in more bits, in all layers."""
    numbers, rows = case.config.kv_heads * case.config.head_dim, loads.prompt_rows(case) + NEW - 2
    levels = upper * -(-numbers * HIGH // 8) + (GAP - upper) * -(-numbers * LOW // 8) + -(-GAP // 8)
    ends = 4 * GAP + 4 * numbers * ((upper > 0) + (upper < GAP))  # of values by row, of keys by channel and class
    packed = case.config.layers * (rows // GAP * (2 * levels + ends) + 2 * numbers)
    return packed + rows % GAP * case.row_bytes


ANY = Setting(objects={"store": RandomMixed(METHOD)})
SYSTEM = System(
    title="ZipVL in mixed precision (text)",
    paper=Paper("ZipVL: Efficient Large Vision-Language Models with Dynamic Token Sparsification and KV Cache "
                "Compression (first version)", "2410.08584"),
    claim="attention among the tokens that matter, whose KV is kept in more bits than that of the others: prefill 2.6 "
    "times as fast and half of the memory at 0.2 % less accuracy.",
    conditions=("LongVA-7B on Video-MME", "prompts that are mostly tokens of images"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many tokens in every layer, the last ones among them, the others drawn at random",
    line="attention among tokens that matter, others in fewer bits: prefill 2.6 times as fast, 0.2 % lost",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("images, which have more tokens to spare than text",),
    counters=(
        Counter("KV bytes held before the last token, at most", "as if all rows of full blocks had four bits",
                lambda case: held(case.method), lambda case: in_bits(case, GAP), bound="at most"),
        Counter("KV bytes held before the last token, at least", "as if one row of each block had four bits",
                lambda case: held(case.method), lambda case: in_bits(case, 1), bound="at least"),
    ),
    savings=(Saving("KV bytes held before the last token", lambda case, run: held(run), "baseline", 2.0),),
    quality=long_texts(always(ON), always(ANY), beside={"the others dropped": always(DROPPED)}),
    timings=(
        Timing("seconds per prompt of 768 tokens", 1.0, seconds=lambda run: run.seconds, load=loads.lone(768, 1)),
        Timing("time per token at 1,500 tokens, against rows as they are", tokens=1500, price=True),
    ),
)  # fmt: skip
