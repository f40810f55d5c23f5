"""CacheGen: prompts' KV on its way between engines, coded to its entropy."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.controls import Coarse
from phasewise.reproduce.system import Case, Counter, Paper, Quality, Saving, Setting, System

APART = {"place": "disaggregated"}


def scales(case: Case) -> int:
    """Bytes of a row's scales: bfloat16, one per layer and head, for keys and for values."""
    return 2 * 2 * case.config.layers * case.config.kv_heads


SYSTEM = System(
    title="CacheGen",
    paper=Paper("CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving", "2310.07240"),
    claim="KV coded per layer and channel is 3.5 to 4.3 times smaller than in 8 bits, at an accuracy of 0.98 of the "
    "original, so that contexts load 3.2 to 3.7 times faster over links of 0.1 to 10 Gbit/s.",
    conditions=("Mistral-7B, Llama-34B and 70B", "LongChat, TriviaQA and others, contexts of thousands of tokens",
                "stored contexts streamed over a network"),
    method=Setting({**APART, "store": "cachegen:level=2"}),
    baseline=Setting({**APART, "store": "int8"}),
    control=Setting(APART, {"store": Coarse(1)}),
    control_is="the same coder with three levels for every number: smaller still, and no longer the context",
    load=loads.answering("recall@1k", "passkey@1k", n=8),
    missing=("the time to load a stored context over a slow link", "levels that follow the bandwidth chunk by chunk"),
    counters=(
        Counter("hand-offs", "one per request", lambda case: case.work.handoffs, lambda case: len(case.entries)),
        Counter("KV bytes sent as they are", "rows of the prompts x bytes of a row",
                lambda case: case.work.kv_bytes_sent, lambda case: loads.prompt_rows(case) * case.row_bytes,
                load=loads.answering("recall@1k", n=8), who=Setting({**APART, "store": "cachegen:level=0"})),
        Counter("KV bytes sent in 8 bits", "half of them, and a bfloat16 scale per row, head, keys and values",
                lambda case: case.work.kv_bytes_sent,
                lambda case: loads.prompt_rows(case) * (case.row_bytes // 2 + scales(case)),
                load=loads.answering("recall@1k", n=8), who=Setting({**APART, "store": "int8"})),
    ),
    savings=(Saving("KV bytes sent", lambda case, run: run.work.kv_bytes_sent, "baseline", 3.5),),
    quality=Quality(("recall@1k", "passkey@1k", "copy"), allowed=0.05, examples=50),
)  # fmt: skip
