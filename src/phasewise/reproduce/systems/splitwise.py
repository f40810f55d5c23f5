"""Splitwise, the runtime: KV crosses to its token machine while the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phasewise.bench.machine import cores
from phasewise.bench.workloads import lengths
from phasewise.plan.arrivals import Load
from phasewise.plan.layout import Layout
from phasewise.plan.link import Link
from phasewise.plan.search import Choice, Goal, Question, SearchSpace, Tried, joined, search
from phasewise.plan.setting import CostsByRole, ServerSetting, known
from phasewise.plan.shape import DecoderShape
from phasewise.plan.slowdown import Slowdowns
from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Saving, Setting, System, Timing
from phasewise.request.params import SLO

CHUNKS, WHOLE = {"schedule": "sarathi:budget=128"}, {"schedule": f"sarathi:budget={1 << 30}"}
METHOD = Setting({"place": "splitwise", **CHUNKS}, cluster="processes")
TOGETHER = Setting(CHUNKS)
LOAD = loads.arriving(768, 768, 768, new=96, least=384)

# ---- provisioning, in simulation
LLAMA = DecoderShape(80, 8192, 64, 8, 128, 28672, 32000)  # sizes of Llama-2-70B
CONVERSATION = "lognormal:prompt=1020,spread=0.8,longest=7000,new=129,new_spread=0.7,new_longest=1000"  # as Azure's
WAYS, LINK = 8, Link(2e11, 1e-4)  # devices of a machine; between machines, as in the paper's simulator
CAPPED = "h100-350w"
DESIGNS = {"AA": ("a100", "a100"), "HH": ("h100", "h100"), "HA": ("h100", "a100"), "HHcap": ("h100", CAPPED)}
SPLITS = (0.3, 0.5, 0.7, 0.9)  # shares of a budget's machines that compute prompts
TOGETHER_BY = ("prefill_first", "sarathi:budget=512")  # schedulers of machines without pools
MORE, MORE_FOR_LESS, LESS = 2.35, 1.4, 0.8  # times the throughput, at the same budget and at less of it


@dataclass(frozen=True)
class Provisioning:
    """The machines that a budget buys: that of `machines` machines of A100, in $/h (iso-cost) or W (iso-power).

    Pools are asked with `requests`, and one machine without pools, which has a part of the rate, with a quarter of
    them: so both loads last long enough for queues to show.
    """

    goal: Goal
    machines: int
    requests: int
    seed: int

    def of(self, kind: str) -> float:
        """Returns what a machine of this kind costs, $/h, or takes, W."""
        source = known({"": kind}, WAYS, LLAMA)
        return source.price("") if self.goal == "iso-cost" else source.power("")

    def budget(self, share: float = 1.0) -> float:
        return share * self.machines * self.of("a100")

    def pools(self, share: float) -> Iterator[SearchSpace]:
        """A space for each split of each design."""
        for prompt, token in DESIGNS.values():
            each, other = self.of(prompt), self.of(token)
            most = int((self.budget(share) - other) / each)
            for prompts in sorted({max(1, round(part * most)) for part in SPLITS}):
                tokens = int((self.budget(share) - prompts * each) / other)
                if tokens > 0:
                    layouts = Layout("prompt", WAYS, 1, prompt), Layout("token", WAYS, 1, token)
                    place = f"splitwise:prompt={prompts},token={tokens}"
                    yield SearchSpace(WAYS * (prompts + tokens), [place], ["splitwise"], layouts=layouts)

    def best(self, spaces: list[SearchSpace], share: float, requests: int) -> Tried:
        """The choice of which the budget's servers carry most requests within the paper's nine slow-downs."""

        def source(choice: Choice) -> CostsByRole:
            return known({"": "a100"}, WAYS, LLAMA, layouts=choice.roles)

        alone = Slowdowns(known({"": "a100"}, WAYS, LLAMA).cost("", None))
        load = Load(lengths(CONVERSATION), requests, None, 1.0, self.seed)
        setting = ServerSetting(prefix_cache=False, link=LINK)
        question = Question(load, SLO(), source, setting, self.goal, 0.04, self.budget(share), alone)
        return search(joined(spaces), question, processes=cores())[0]

    def found(self, share: float) -> tuple[Tried, Tried]:
        """The best pools for `share` of the budget, and the best machines without pools for all of it."""
        plain = SearchSpace(
            WAYS, ["colocated"], TOGETHER_BY, layouts=[Layout("", WAYS, 1, k) for k in ("a100", "h100")]
        )
        pools = self.best(list(self.pools(share)), share, self.requests)
        return pools, self.best([plain], 1.0, self.requests // 4)


def provisioned(lab: Lab, goal: Goal) -> Provisioning:
    return Provisioning(goal, 4 if lab.scale.quick else 14, 400 if lab.scale.quick else 2400, lab.scale.seed)


def compared(apart: Tried, together: Tried, least: float) -> AttemptOutcome:
    ratio = apart.worth / together.worth if together.worth else float("inf")
    return AttemptOutcome(
        ratio >= least,
        f"{apart.worth:.1f} requests/s ({apart.choice}) against {together.worth:.1f} ({together.choice}): "
        f"{ratio:.2f} times",
    )


def same_price(lab: Lab) -> AttemptOutcome:
    return compared(*provisioned(lab, "iso-cost").found(1.0), MORE)


def same_power(lab: Lab) -> AttemptOutcome:
    return compared(*provisioned(lab, "iso-power").found(1.0), MORE)


def lower_price(lab: Lab) -> AttemptOutcome:
    return compared(*provisioned(lab, "iso-cost").found(LESS), MORE_FOR_LESS)


def colocated(lab: Lab) -> AttemptOutcome:
    """The tokens of one engine, in float32."""
    apart, together = (
        lab.play(setting, LOAD(lab.asked("pocket")), "pocket", "float32").outs for setting in (METHOD, TOGETHER)
    )
    return AttemptOutcome(apart == together, "the same tokens" if apart == together else "other tokens")


SIMULATED = (
    "requests/s within the nine slow-downs of pools (AA, HH, HA, HHcap) over machines without pools "
    "(Llama-70B's sizes, simulated)"
)
SYSTEM = System(
    title="Splitwise (runtime)",
    paper=Paper("Splitwise: Efficient generative LLM inference using phase splitting", "2311.18677"),
    claim="the KV of a prompt crosses while the rest of it is computed, so that little of the transfer is seen: the "
    "second token comes 16.5 % later instead of 64 %, whole answers 0.8 % instead of 3 %; with machines chosen per "
    "phase, 1.4 times the throughput at 20 % less cost, and 2.35 times at the same cost and power.",
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
    missing=("machines of different kinds that run", "layers sent one by one under the default scheduler"),
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
    attempts=(
        Attempt("exact", "tokens of a colocated engine, in float32", "the same tokens", colocated),
        Attempt("cost", f"{SIMULATED}, for the price of 14 machines of A100", f"at least {MORE} times as much",
                same_price),
        Attempt("cost", f"{SIMULATED}, for the power of 14 machines of A100", f"at least {MORE} times as much",
                same_power),
        Attempt("cost", f"{SIMULATED}, for {LESS} of that price against all of it",
                f"at least {MORE_FOR_LESS} times as much", lower_price),
    ),
    timings=(
        Timing("time from the first token to the second", 1.0, loads.late_second),
        Timing("time from the first token to the second, against colocated", seconds=loads.late_second, price=True,
               settings={"baseline": TOGETHER}),
        Timing("longest time between two tokens of a stream, against colocated", seconds=loads.longest_gap, price=True,
               settings={"baseline": TOGETHER}),
    ),
)  # fmt: skip
