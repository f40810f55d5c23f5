"""DistServe, the runtime: prompts on some workers, tokens on others."""

from __future__ import annotations

from phasewise.bench.machine import cores
from phasewise.bench.workloads import lengths
from phasewise.plan.arrivals import Load
from phasewise.plan.layout import Layout
from phasewise.plan.link import Link
from phasewise.plan.search import Choice, Question, SearchSpace, Tried, search
from phasewise.plan.setting import CostsByRole, ServerSetting, known
from phasewise.plan.shape import DecoderShape
from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Setting, System, Timing
from phasewise.request.params import SLO

APART = Setting({"place": "disaggregated"}, cluster="processes")
OPT = DecoderShape(40, 5120, 40, 40, 128, 13824, 50272)  # sizes of OPT-13B
CHATS = "lognormal:prompt=500,spread=0.8,longest=2000,new=150,new_spread=0.6,new_longest=500"
TARGETS = SLO(0.25, 0.1)  # the paper's for this model and chats, seconds
DEVICES, LINK = 4, Link(3e11, 1e-5)  # of a node, bytes/s and seconds
PAIRS = tuple(f"disaggregated:prefill={p},decode={d}" for p, d in ((1, 1), (2, 1), (1, 2), (3, 1)))
DEGREES = (Layout("", 1, 1), Layout("", 2, 1), Layout("", 1, 2))
LEAST = 2.0  # times as much, the paper's least for chats


def placements(requests: int, seed: int) -> tuple[Tried, Tried]:
    """The best placement with phases apart, and the best engine that does both, prompts first as vLLM then did: by the
    goodput per device on A100 by its device file."""

    def source(choice: Choice) -> CostsByRole:
        return known({"": "a100"}, 1, OPT, layouts=choice.roles)

    load = Load(lengths(CHATS), requests, seed=seed)
    question = Question(load, TARGETS, source, ServerSetting(prefix_cache=False, link=LINK), precision=0.04)
    apart, together = (
        search(SearchSpace(DEVICES, places, ("prefill_first",), layouts=DEGREES), question,
               processes=cores())[0]
        for places in (PAIRS, ("colocated",))
    )  # fmt: skip
    return apart, together


def carries(lab: Lab) -> AttemptOutcome:
    """Goodput per device of OPT-13B's sizes, by search over degrees per role, in simulation."""
    apart, together = placements(100 if lab.scale.quick else 600, lab.scale.seed)
    ratio = apart.worth / together.worth if together.worth else float("inf")
    return AttemptOutcome(
        ratio >= LEAST,
        f"{apart.worth:.2f} requests/s per device ({apart.choice}) against {together.worth:.2f} ({together.choice}): "
        f"{ratio:.2f} times",
    )


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
    promises=("cost", "time"),
    load=loads.arriving(768, 768, 768, new=96),
    exact=True,
    missing=("goodput on the clock at rising rates", "tensor and pipeline parallel workers that run"),
    counters=(
        Counter("KV bytes sent", "rows of the prompts x bytes of a row",
                lambda case: case.work.kv_bytes_sent, lambda case: loads.prompt_rows(case) * case.row_bytes),
        Counter("hand-offs", "one per request", lambda case: case.work.handoffs, lambda case: len(case.entries)),
        Counter("rows computed", "those of colocated: nothing twice",
                lambda case: case.work.rows, lambda case: case.runs["baseline"].work.rows),
    ),
    attempts=(
        Attempt("cost", f"goodput per device of the placement that the search finds (OPT-13B's sizes on {DEVICES} "
                "A100, simulated), against one engine with prompts first", f"at least {LEAST} times as much", carries),
    ),
    timings=(
        Timing("longest time between two tokens of a stream", 1.0, loads.longest_gap),
        Timing("longest time between two tokens of a stream", 1.0, loads.longest_gap, against="control"),
        Timing("time to the first token of the prompts that come", seconds=loads.late_first, price=True),
    ),
    note="Two cores are two machines of one core each; the model has 7 million weights. Colocated, a step has both "
    "cores; apart, each phase has one.",
)  # fmt: skip
