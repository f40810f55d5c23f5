"""Expected Attention: rows stay that later queries are expected to attend to."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.system import Case, Counter, Paper, Quality, Saving, Setting, System, Timing

KEEP, NEW = 0.25, 32


def stay(case: Case) -> int:
    """Rows per head that stay of the prompt."""
    return int(KEEP * loads.prompt_rows(case))


SYSTEM = System(
    title="Expected Attention",
    paper=Paper("Expected Attention: KV Cache Compression by Estimating Attention from Future Queries", "2510.00636"),
    claim="a closed form of the attention that later queries will pay ranks rows better than what past queries paid: "
    "with a share of the KV removed, answers are better than with SnapKV's choice, whatever is asked later; the peak "
    "of memory falls by up to 15 GB for contexts of 120k tokens.",
    conditions=("Llama-3.1-8B, Qwen3-8B and Gemma3-12B", "LongBench, Ruler and needles", "the question comes later"),
    method=Setting({"evict": f"expected_attention:keep={KEEP}"}),
    baseline=Setting(),
    control=Setting({"evict": f"snapkv:keep={KEEP},window=32"}),
    control_is="as many rows per head, chosen by the attention of the prompt's end (SnapKV)",
    load=loads.lone(768, NEW),
    missing=("queries of the whole prompt: the last 256 stand for them", "compressing again while decoding"),
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
