"""DistServe, the runtime: prompts on some workers, tokens on others."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.system import Counter, Paper, Setting, System, Timing

APART = Setting({"place": "disaggregated"}, cluster="processes")

SYSTEM = System(
    title="DistServe (runtime)",
    paper=Paper("DistServe: Disaggregating Prefill and Decoding for Goodput-optimized LLM Serving", "2401.09670"),
    claim="with phases apart no stream waits for a prompt; with a placement searched for each of them the goodput is "
    "2.0 to 4.6 times vLLM's for chats, 5.7 times for code and 4.3 times for summaries.",
    conditions=("OPT-13B to OPT-175B on 32 A100 in four nodes", "90 % of the requests within TTFT and TPOT targets",
                "several GPUs per worker, placements by search"),
    method=APART,
    baseline=Setting(),
    control=Setting({"place": f"disaggregated:local={1 << 30}"}, cluster="processes"),
    control_is="the same workers, but every prompt starts where it will decode: nothing is apart",
    line="phases apart, placements searched: goodput 2.0 to 5.7 times vLLM's",
    promises=("time",),
    load=loads.arriving(768, 768, 768, new=96),
    exact=True,
    missing=("the placement search (`phasewise plan`)", "goodput at rising rates",
             "tensor and pipeline parallel workers"),
    counters=(
        Counter("KV bytes sent", "rows of the prompts x bytes of a row",
                lambda case: case.work.kv_bytes_sent, lambda case: loads.prompt_rows(case) * case.row_bytes),
        Counter("hand-offs", "one per request", lambda case: case.work.handoffs, lambda case: len(case.entries)),
        Counter("rows computed", "those of colocated: nothing twice",
                lambda case: case.work.rows, lambda case: case.runs["baseline"].work.rows),
    ),
    timings=(
        Timing("longest time between two tokens of a stream", 1.0, loads.longest_gap),
        Timing("longest time between two tokens of a stream", 1.0, loads.longest_gap, against="control"),
        Timing("time to the first token of the prompts that come", seconds=loads.late_first, price=True),
    ),
    note="Two cores are two machines of one core each; the model has 7 million weights. Colocated, a step has both "
    "cores; apart, each phase has one.",
)  # fmt: skip
