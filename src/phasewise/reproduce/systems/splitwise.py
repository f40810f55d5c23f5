"""Splitwise, the runtime: KV crosses to its token machine while the prompt is computed."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.system import Counter, Paper, Saving, Setting, System, Timing

CHUNKS = {"schedule": "sarathi:budget=128"}

SYSTEM = System(
    title="Splitwise (runtime)",
    paper=Paper("Splitwise: Efficient generative LLM inference using phase splitting", "2311.18677"),
    claim="the KV of a prompt crosses while the rest of it is computed, so that little of the transfer is seen: the "
    "second token comes 16.5 % later instead of 64 %, whole answers 0.8 % instead of 3 %; with machines chosen per "
    "phase, 1.4 times the throughput at 20 % less cost.",
    conditions=("BLOOM-176B and Llama-70B on DGX-A100 and DGX-H100", "Azure traces of chats and code",
                "InfiniBand between machines"),
    method=Setting({"place": "splitwise", **CHUNKS}, cluster="processes"),
    baseline=Setting(CHUNKS),
    control=Setting({"place": "disaggregated", **CHUNKS}, cluster="processes"),
    control_is="the same workers and chunks, but the KV is fetched when the prompt is done: all of it is waited for",
    load=loads.arriving(768, 768, 768, new=96, least=384),
    exact=True,
    missing=("the cluster simulator, provisioning and traces, which are not built yet", "machines of different kinds",
             "layers sent one by one under the default scheduler"),
    counters=(
        Counter("KV bytes sent", "rows of the prompts x bytes of a row",
                lambda case: case.work.kv_bytes_sent, lambda case: loads.prompt_rows(case) * case.row_bytes),
        Counter("hand-offs", "one per request", lambda case: case.work.handoffs, lambda case: len(case.entries)),
        Counter("rows computed", "those of colocated: nothing twice",
                lambda case: case.work.rows, lambda case: case.runs["baseline"].work.rows),
    ),
    savings=(
        Saving("KV bytes that cross after the prompt is done", lambda case, run: run.work.kv_bytes_exposed, "control",
               1.5),
    ),
    timings=(
        Timing("longest time between two tokens of a stream", 1.0, loads.longest_gap),
        Timing("time from the first token to the second", 1.0, loads.late_second, against="control"),
        Timing("time from the first token to the second", seconds=loads.late_second, price=True),
    ),
)  # fmt: skip
