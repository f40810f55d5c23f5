"""Splitwise, the runtime: KV crosses to its token machine while the prompt is computed."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Saving, Setting, System, Timing

CHUNKS, WHOLE = {"schedule": "sarathi:budget=128"}, {"schedule": f"sarathi:budget={1 << 30}"}
METHOD = Setting({"place": "splitwise", **CHUNKS}, cluster="processes")
TOGETHER = Setting(CHUNKS)
LOAD = loads.arriving(768, 768, 768, new=96, least=384)


def colocated(lab: Lab) -> AttemptOutcome:
    """The tokens of one engine, in float32."""
    apart, together = (
        lab.play(setting, LOAD(lab.asked("pocket")), "pocket", "float32").outs for setting in (METHOD, TOGETHER)
    )
    return AttemptOutcome(apart == together, "the same tokens" if apart == together else "other tokens")


SYSTEM = System(
    title="Splitwise (runtime)",
    paper=Paper("Splitwise: Efficient generative LLM inference using phase splitting", "2311.18677"),
    claim="the KV of a prompt crosses while the rest of it is computed, so that little of the transfer is seen: the "
    "second token comes 16.5 % later instead of 64 %, whole answers 0.8 % instead of 3 %; with machines chosen per "
    "phase, 1.4 times the throughput at 20 % less cost.",
    conditions=("BLOOM-176B and Llama-70B on DGX-A100 and DGX-H100", "Azure traces of chats and code",
                "InfiniBand between machines"),
    method=METHOD,
    baseline=Setting({"place": "disaggregated", **CHUNKS}, cluster="processes"),
    control=Setting({"place": "splitwise", **WHOLE}, cluster="processes"),
    control_is="prompts computed in one piece: there is nothing to send while they are",
    line="KV crosses while the prompt is computed: the second token 16.5 % later instead of 64 %",
    promises=("cost", "time"),
    load=LOAD,
    exact=True,
    missing=("provisioning by cost and power (`phasewise plan --kinds` searches it)", "machines of different kinds",
             "layers sent one by one under the default scheduler"),
    counters=(
        Counter("KV bytes sent", "rows of the prompts x bytes of a row",
                lambda case: case.work.kv_bytes_sent, lambda case: loads.prompt_rows(case) * case.row_bytes),
        Counter("hand-offs", "one per request", lambda case: case.work.handoffs, lambda case: len(case.entries)),
        Counter("rows computed", "those of the serialised transfer: nothing twice",
                lambda case: case.work.rows, lambda case: case.runs["baseline"].work.rows),
    ),
    savings=(
        Saving("KV bytes that cross after the prompt is done", lambda case, run: run.work.kv_bytes_exposed,
               "baseline", 1.5),
        Saving("KV bytes that cross after the prompt is done", lambda case, run: run.work.kv_bytes_exposed,
               "control", 1.5),
    ),
    attempts=(Attempt("exact", "tokens of a colocated engine, in float32", "the same tokens", colocated),),
    timings=(
        Timing("time from the first token to the second", 1.0, loads.late_second),
        Timing("time from the first token to the second, against colocated", seconds=loads.late_second, price=True,
               settings={"baseline": TOGETHER}),
        Timing("longest time between two tokens of a stream, against colocated", seconds=loads.longest_gap, price=True,
               settings={"baseline": TOGETHER}),
    ),
)  # fmt: skip
