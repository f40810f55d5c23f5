"""semi-PD: both phases apart on the same cores, over one pool of KV."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.system import Counter, Paper, Setting, System, Timing

SYSTEM = System(
    title="semi-PD",
    paper=Paper("semi-PD: Towards Efficient LLM Serving via Phase-Wise Disaggregated Computation and Unified Storage",
                "2504.19867"),
    claim="phases apart without copies of KV or weights, with shares of the device that follow the targets: mean "
    "latency 1.27 to 2.58 times lower (DeepSeek), 1.55 to 1.72 times as many requests within targets (Llama).",
    conditions=("A100 GPUs, shares of multiprocessors", "Llama-3 8B and 70B, DeepSeek-V2 and V3",
                "ShareGPT, LongBench"),
    method=Setting({"place": "semi_pd"}, cluster="processes"),
    baseline=Setting(),
    control=Setting({"place": "disaggregated"}, cluster="processes"),
    control_is="the same workers with a pool each: every byte of a prompt's KV is copied",
    line="phases apart over one pool of KV: mean latency 1.27 to 2.58 times lower",
    promises=("time",),
    load=loads.arriving(768, 768, 768, new=96),
    exact=True,
    missing=("goodput at rising rates", "shares of a GPU"),
    counters=(
        Counter("KV bytes sent", "0: rows change hands where they lie",
                lambda case: case.work.kv_bytes_sent, lambda case: 0),
        Counter("hand-offs", "one per request", lambda case: case.work.handoffs, lambda case: len(case.entries)),
        Counter("rows computed", "those of colocated: nothing twice",
                lambda case: case.work.rows, lambda case: case.runs["baseline"].work.rows),
    ),
    timings=(
        Timing("longest time between two tokens of a stream", 1.0, loads.longest_gap),
        Timing("mean time to the end of the prompts that come", 1.0, loads.late_whole),
        Timing("time from the first token to the second", 1.0, loads.late_second, against="control"),
    ),
    note="On two cores there are three splits: one core each, or both for one phase and one for the other.",
)  # fmt: skip
