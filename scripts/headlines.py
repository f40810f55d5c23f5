"""The headline shapes of DistServe and Splitwise, by simulation on device files.

    python scripts/headlines.py [--which distserve|splitwise] [--seconds 30] [--out FILE.json]

DistServe (arXiv 2401.09670): goodput per device of pools for each phase over one engine that does both, as targets get
tighter, on A100 with a model of 13B sizes. Splitwise (arXiv 2311.18677): the load that clusters of the same power, and
of the same price, carry within its nine targets (slow-downs of TTFT, TPOT and the whole request at P50, P90 and P99,
against a machine of eight A100 with nobody else), on a model of 70B sizes; and what a split made for coding is worth
for conversations. A verdict per claim follows from the numbers by a rule that is printed with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise.bench.latency import percentile
from phasewise.bench.workloads import lengths
from phasewise.cli.progress import working
from phasewise.plan.arrivals import Load
from phasewise.plan.cost import StepWork
from phasewise.plan.link import Link
from phasewise.plan.search import Question, SearchSpace, Tried, search
from phasewise.plan.sequence import SimulatedRequest
from phasewise.plan.setting import CostsByRole, ServerSetting, known
from phasewise.plan.shape import DecoderShape
from phasewise.plan.simulate import Scenario, run
from phasewise.request.params import SLO

B13 = DecoderShape(40, 5120, 40, 40, 128, 13824, 32000)  # every head has KV of its own, as OPT-13B's have
B70 = DecoderShape(80, 8192, 64, 8, 128, 28672, 32000)
INSIDE, ACROSS = Link(3e11, 1e-5), Link(2e11, 1e-4)  # of one machine; of machines, as Splitwise's simulator has it

# ---- DistServe
CHAT = "lognormal:prompt=500,spread=0.8,longest=2000,new=150,new_spread=0.6,new_longest=500"
SUMMARIES = "lognormal:prompt=1700,spread=0.2,longest=2000,new=90,new_spread=0.4,new_longest=300"
TARGETS = {"tight": (0.25, 0.03), "medium": (0.5, 0.06), "relaxed": (4.0, 0.3)}  # seconds of TTFT and TPOT
POOLS = tuple(f"disaggregated:prefill={p},decode={d}" for p, d in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3)))
FIRST, CHUNKS = "prefill_first", "sarathi:budget=512"  # what it was compared with, and what came after

# ---- Splitwise
AZURE = {
    "coding": "lognormal:prompt=1500,spread=0.6,longest=7000,new=13,new_spread=0.7,new_longest=200",
    "conversation": "lognormal:prompt=1020,spread=0.8,longest=7000,new=129,new_spread=0.7,new_longest=1000",
}
LIMITS = {"ttft": (2.0, 3.0, 6.0), "tpot": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}  # at P50, P90, P99
WAYS = 8  # devices of a machine
POWER, PRICE = {"a100": 1.0, "h100": 1.75}, {"a100": 1.0, "h100": 2.16}  # of a machine, A100's as 1
DESIGNS = {"AA": ("a100", "a100"), "HH": ("h100", "h100"), "HA": ("h100", "a100")}  # of prompts, of tokens
FLEET = 14  # machines of A100 whose power, or price, all may take
PRECISION = 0.04


def distserve(seconds: float) -> Iterator[dict[str, Any]]:
    """A row per load and target: goodput per device, requests/s."""
    source = known({"": "a100"}, 1, B13)
    for name, text in (("chat", CHAT), ("summarising", SUMMARIES)):
        for tightness, (ttft, tpot) in TARGETS.items():
            slo = SLO(ttft, tpot)
            load = Load(lengths(text), max(400, int(100 * ttft)), None, 1.0, 1)
            setting = ServerSetting(prefix_cache=False, link=INSIDE)
            question = Question(load, slo, lambda choice: source, setting, precision=PRECISION)
            with working(f"{name}, {tightness}"):
                found = search(SearchSpace(4, ("colocated", *POOLS), (FIRST, CHUNKS)), question, prune=False)
            one = {each.choice.schedule: each for each in found if each.choice.place == "colocated"}
            pools: Tried = next(each for each in found if each.choice.place != "colocated")
            yield {
                "load": name, "targets": tightness, "ttft": ttft, "tpot": tpot, "first": one[FIRST].worth,
                "chunks": one[CHUNKS].worth, "pools": pools.worth, "shape": pools.choice.place.partition(":")[2],
            }  # fmt: skip


def told_distserve(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| load | targets | prompts first | slices of 512 | pools | times the first | times the second |",
             "|---|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        aims = f"{row['targets']}: {1e3 * row['ttft']:.0f} / {1e3 * row['tpot']:.0f} ms"
        ratios = [f"{row['pools'] / row[name]:.2f}" if row[name] else "only pools" for name in ("first", "chunks")]
        own = [f"{row['first']:.2f}", f"{row['chunks']:.2f}", f"{row['pools']:.2f} ({row['shape']})"]
        lines.append(f"| {row['load']} | {aims} | {' | '.join([*own, *ratios])} |")
    tight = [row for row in rows if row["targets"] == "tight"]
    loose = [row for row in rows if row["targets"] == "relaxed"]
    wins = all(row["pools"] > row["first"] for row in tight)
    both = all(row["pools"] <= 1.02 * max(row["first"], row["chunks"]) for row in loose)
    verdict = "holds" if wins and both else "partly" if wins or both else "not here"
    rule = "pools beat prompts-first under both tight targets, and no pool beats the better engine under relaxed ones"
    return "\n".join([*lines, "", f"verdict: {verdict} ({rule})"])


# ---- Splitwise
@dataclass(frozen=True)
class Fleet:
    """Machines of one design, and how they are told apart; without pools, each is an engine of its own."""

    name: str
    prompts: str
    tokens: str
    sizes: tuple[int, int]

    @property
    def machines(self) -> int:
        return sum(self.sizes)

    def scenario(self, schedule: str) -> Scenario:
        if not self.sizes[1]:
            source = known({"": self.prompts}, WAYS, B70)
            return ServerSetting(schedule, prefix_cache=False).scenario(source, self.sizes[0], (), 1)
        source: CostsByRole = known({"prompt": self.prompts, "token": self.tokens}, WAYS, B70)
        place = f"splitwise:prompt={self.sizes[0]},token={self.sizes[1]}"
        return ServerSetting(schedule, place, prefix_cache=False, link=ACROSS).scenario(source, 1, (), 1)


def fleets(weights: Mapping[str, float]) -> Iterator[Fleet]:
    """All that can be had for the weight of FLEET machines of A100: no pools, and a range of splits."""
    for name in ("a100", "h100"):
        n = int(FLEET / weights[name])
        yield Fleet(f"one pool, {name}", name, name, (n, 0))
    for name, (p, t) in DESIGNS.items():
        most = int((FLEET - weights[t]) / weights[p])
        for prompts in sorted({max(1, round(part * most)) for part in (0.3, 0.5, 0.7, 0.9)}):
            tokens = int((FLEET - prompts * weights[p]) / weights[t])
            if tokens:
                yield Fleet(name, p, t, (prompts, tokens))


class Alone:
    """What a request takes on a machine of eight A100 with nobody else."""

    def __init__(self) -> None:
        self._seconds: Callable[[StepWork], float] = known({"": "a100"}, WAYS, B70).cost("", None).seconds

    def slower(self, job: SimulatedRequest) -> dict[str, float]:
        """How many times as long it took."""
        n = job.prompt_len
        ttft = self._seconds(StepWork(prefill_rows=n, pairs=n * (n + 1) / 2, prefixes=n, emits=1))
        tpot = self._seconds(StepWork(decode_rows=1, context=n + job.new // 2, emits=1))
        assert job.ttft is not None and job.last_token is not None
        found = {"ttft": job.ttft / ttft, "e2e": (job.last_token - job.arrived) / (ttft + tpot * (job.new - 1))}
        return found | ({} if job.tpot is None else {"tpot": job.tpot / tpot})


def carried(fleet: Fleet, text: str, seconds: float, alone: Alone) -> float:
    """The highest rate at which all nine targets hold; of the better schedule where there are no pools."""

    def holds(scenario: Scenario, rate: float) -> bool:
        jobs = run(scenario, Load(lengths(text), max(300, int(rate * seconds)), rate, 1.0, 1).jobs(SLO())).jobs
        slower = [alone.slower(job) for job in jobs if job.finished]
        if len(slower) < len(jobs):
            return False
        for name, limits in LIMITS.items():
            values = [one[name] for one in slower if name in one]
            if any((percentile(values, q) or 0.0) > limit for q, limit in zip((0.5, 0.9, 0.99), limits, strict=True)):
                return False
        return True

    best = 0.0
    for schedule in (FIRST, CHUNKS) if not fleet.sizes[1] else (FIRST,):
        scenario = fleet.scenario(schedule)
        low, high = best, max(2 * best, 2.0 * fleet.machines)
        if best and not holds(scenario, best):
            continue
        while holds(scenario, high):
            low, high = high, 2 * high
        while high - low > PRECISION * high and high > 0.05:
            middle = (low + high) / 2
            low, high = (middle, high) if holds(scenario, middle) else (low, middle)
        best = max(best, low)
    return best


def splitwise(seconds: float) -> Iterator[dict[str, Any]]:
    """A row per fleet: requests/s of each load."""
    alone = Alone()
    for same, weights in (("power", POWER), ("price", PRICE)):
        for fleet in fleets(weights):
            with working(f"the same {same}: {fleet.name} {fleet.sizes}"):
                rates = {name: carried(fleet, text, seconds, alone) for name, text in AZURE.items()}
            yield {"same": same, "fleet": fleet.name, "sizes": fleet.sizes, **rates}


def told_splitwise(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| the same | load | one pool, A100 | one pool, H100 | AA | HH | HA | best pools over best single |",
             "|---|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    gains, moved = [], []
    for same in ("power", "price"):
        for load in AZURE:
            mine = [row for row in rows if row["same"] == same]
            best = {name: max((row for row in mine if row["fleet"] == name), key=lambda row: float(row[load]))
                    for name in ("one pool, a100", "one pool, h100", *DESIGNS)}  # fmt: skip
            single = max(best[name][load] for name in ("one pool, a100", "one pool, h100"))
            pools = max((best[name] for name in DESIGNS), key=lambda row: float(row[load]))
            gains.append(pools[load] / single if single else float("inf"))
            cells = [f"{row[load]:.1f}" + ("" if name.startswith("one") else f" ({row['sizes'][0]}+{row['sizes'][1]})")
                     for name, row in best.items()]  # fmt: skip
            lines.append(f"| {same} | {load} | {' | '.join(cells)} | {gains[-1]:.2f} |")
            if load == "coding":
                own = max(row["conversation"] for row in mine if row["fleet"] == pools["fleet"])
                moved.append(pools["conversation"] / own if own else 0.0)
                shape = f"{pools['fleet']} {pools['sizes'][0]}+{pools['sizes'][1]}"
                note = f"made for coding ({shape}, same {same}), given conversations: {moved[-1]:.2f} of the best split"
                lines.append(f"| | {note} | | | | | | |")
    more, worse = all(gain > 1.0 for gain in gains), all(part < 1.0 for part in moved)
    verdict = "holds" if more and worse else "partly" if any(gain > 1.0 for gain in gains) or worse else "not here"
    rule = "pools carry more at the same power and at the same price, and a coding split is worse for conversations"
    return "\n".join([*lines, "", f"verdict: {verdict} ({rule})"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--which", choices=["distserve", "splitwise", "both"], default="both")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kept: dict[str, Any] = {}
    for name, rows, told in (
        ("distserve", distserve, told_distserve),
        ("splitwise", splitwise, told_splitwise),
    ):
        if args.which in (name, "both"):
            kept[name] = list(rows(args.seconds))
            print(f"## {name}\n\n{told(kept[name])}\n", flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
