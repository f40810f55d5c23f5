"""phasewise's planner held against aiconfigurator's search, on the same costs of steps.

    make silicon
    python scripts/against_aiconfigurator.py [--cases 1,2,12] [--precision 0.02] [--out FILE.json]

Both plan for H100s from the same measured tables (TensorRT-LLM), for models of which there is only a config.json, with
lengths of published workloads: is one engine that does both phases (aggregated) or a pool for each (disaggregated)
worth more requests per second and device? Both choose among the same degrees (the same in both pools, no data or
pipeline parallelism); theirs its batches and pool sizes, ours its budget and among `SIZES`. Kendall's tau is over
configurations that both have: a degree, with one engine or with a pair of pool sizes.

Theirs takes steps in pools to be 1.1 (prompts) and 1.08 (tokens) times as long as measured; so does ours here. What
they differ in is taken away where they disagree: our arrivals are made steady, and their fixed allowances for queues in
pools (workers used to 0.9 and 0.92, TTFT 1.8 times as long) are set to 1. Exits with 1 if fewer than 9 of 12 winners
agree, or tau is below 0.8. Seconds are of the processor's time.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from phasewise.bench.workloads import lengths
from phasewise.errors import UserError
from phasewise.load import config_of
from phasewise.plan.arrivals import Load
from phasewise.plan.cost import Cost, Price, StepWork
from phasewise.plan.gpu_tables import PREFIX
from phasewise.plan.link import Link
from phasewise.plan.search import TRICKLE, Choice, Question
from phasewise.plan.setting import CostsByRole, ServerSetting, known
from phasewise.plan.shape import DecoderShape
from phasewise.request.params import SLO

SHAPES = Path(__file__).parent / "shapes"
SYSTEM, BACKEND = "h100_sxm", "trtllm"
LENGTHS = {  # medians of published traces: prompt and new tokens
    "chat": (1020, 129),  # Splitwise (arXiv 2311.18677), conversation
    "coding": (1500, 13),  # Splitwise, coding
    "summarising": (1738, 91),  # DistServe (arXiv 2401.09670), LongBench
}
TARGETS = {  # milliseconds of TTFT and TPOT
    "llama-3.1-8b": {"tight": (200, 15), "relaxed": (1000, 50)},
    "qwen3-30b-a3b": {"tight": (300, 20), "relaxed": (1500, 60)},
    "llama-3.1-70b": {"tight": (500, 30), "relaxed": (2500, 80)},
}
DEGREES = {"llama-3.1-8b": (1, 2, 4), "qwen3-30b-a3b": (1, 2, 4), "llama-3.1-70b": (2, 4, 8)}
SIZES = ((1, 2), (1, 1), (3, 2), (2, 1), (3, 1), (4, 1), (6, 1))  # workers for prompts and for tokens
BUDGETS = (512, 2048, 8192, 1024, 4096, 256)  # rows of a step of one engine, the likeliest first
PROMPTS_EACH = 2048  # ... and of a worker for prompts
LINK = Link(4.5e11, 1e-5)  # NVLink of one H100, each way
SLOWER = {"prefill": 1.1, "decode": 1.08}  # steps in pools, as theirs has it
RUNNING = 512  # requests that may share a step, of both
LIVES = 3  # a load lasts so many times as long as a request may ...
QUEUES = 20  # ... and as its first token may take: a queue that grows by a part in twenty shows
STEADY = 0.01  # spread of the gaps of arrivals that are as good as regular
ENOUGH, TAU = 9, 0.8


@dataclass(frozen=True)
class Case:
    model: str
    load: str
    targets: str
    gpus: int

    @property
    def slo(self) -> SLO:
        ttft, tpot = TARGETS[self.model][self.targets]
        return SLO(ttft / 1e3, tpot / 1e3)

    def __str__(self) -> str:
        return f"{self.model}, {self.load}, {self.targets}, {self.gpus} GPUs"


CASES = (
    Case("llama-3.1-8b", "chat", "tight", 8),
    Case("llama-3.1-8b", "chat", "relaxed", 8),
    Case("llama-3.1-8b", "summarising", "tight", 16),
    Case("llama-3.1-8b", "coding", "relaxed", 8),
    Case("qwen3-30b-a3b", "chat", "tight", 16),
    Case("qwen3-30b-a3b", "chat", "relaxed", 16),
    Case("qwen3-30b-a3b", "summarising", "relaxed", 16),
    Case("qwen3-30b-a3b", "coding", "tight", 8),
    Case("llama-3.1-70b", "chat", "tight", 32),
    Case("llama-3.1-70b", "summarising", "tight", 32),
    Case("llama-3.1-70b", "summarising", "relaxed", 32),
    Case("llama-3.1-70b", "coding", "relaxed", 16),
)


@dataclass(frozen=True, order=True)
class Plan:
    """`ways` devices per worker; one engine, or so many workers for prompts and for tokens."""

    ways: int
    prompts: int = 0
    tokens: int = 0

    @property
    def mode(self) -> str:
        return "disaggregated" if self.prompts else "aggregated"

    @property
    def devices(self) -> int:
        return self.ways * max(1, self.prompts + self.tokens)

    @property
    def place(self) -> str:
        return f"disaggregated:prefill={self.prompts},decode={self.tokens}" if self.prompts else "colocated"


def plans(case: Case) -> list[Plan]:
    every = [Plan(ways) for ways in DEGREES[case.model]]
    every += [Plan(ways, *size) for ways in DEGREES[case.model] for size in SIZES]
    return [plan for plan in every if plan.devices <= case.gpus]


# ---- theirs
class Theirs:
    """aiconfigurator's search for a case. `plain`: without its allowances for what its arithmetic leaves out."""

    def __init__(self, case: Case, plain: bool = False) -> None:
        self.case, self.plain = case, plain

    def _task(self, mode: str, roles: Sequence[str], ways: Sequence[int], size: tuple[int, int] | None) -> Any:
        from aiconfigurator.sdk.task_v2 import Task

        prompt, new = LENGTHS[self.case.load]
        ttft, tpot = TARGETS[self.case.model][self.case.targets]
        given: dict[str, Any] = {}
        moe = "a3b" in self.case.model
        for role in roles:
            own = "" if role == "agg" else f"{role}_"
            given |= {f"{own}model_path": str(SHAPES / self.case.model), f"{own}system_name": SYSTEM,
                      f"{own}backend_name": BACKEND}  # fmt: skip
            for what in ("pp", "dp", "moe_ep", "cp"):
                given[f"{role}_{what}_candidates"] = [1]
            given |= {f"{role}_num_gpu_candidates": list(ways), f"{role}_tp_candidates": list(ways),
                      f"{role}_moe_tp_candidates": list(ways) if moe else [1]}  # fmt: skip
        if mode == "agg":
            given["enable_chunked_prefill"] = True  # as our schedules do
        else:
            given |= {f"{role}_latency_correction": factor for role, factor in SLOWER.items()}
            if self.plain:
                given |= {"rate_match_prefill_degradation": 1.0, "rate_match_decode_degradation": 1.0,
                          "autoscale_ttft_correction_factor": 1.0}  # fmt: skip
            if size is not None:  # so many devices can only be these workers
                given |= {"max_prefill_workers": size[0], "max_decode_workers": size[1],
                          "num_gpu_per_replica": [sum(size) * ways[0]]}  # fmt: skip
        return Task(serving_mode=mode, isl=prompt, osl=new, ttft=float(ttft), tpot=float(tpot), pareto_sweep=False,
                    total_gpus=self.case.gpus, **given)  # fmt: skip

    @cache  # noqa: B019  one per case, for as long as the script runs
    def rows(self, mode: str, ways: Sequence[int], size: tuple[int, int] | None = None) -> list[dict[str, Any]]:
        """What it found, the best first; nothing where no configuration meets the targets."""
        from aiconfigurator.sdk.errors import NoResultsError

        roles = ("agg",) if mode == "agg" else ("prefill", "decode")
        try:
            found = self._task(mode, roles, ways, size).run()
        except NoResultsError:
            return []
        return sorted(found.to_dict("records"), key=lambda row: -float(row["seq/s/gpu"]))

    def best(self, mode: str, mixed: bool = False) -> float:
        """Requests/s per device of the best of a mode. `mixed`: pools may have different degrees."""
        degrees = DEGREES[self.case.model]
        groups = [degrees] if mixed else [(ways,) for ways in degrees]
        found = [self.rows("agg" if mode == "aggregated" else "disagg", group) for group in groups]
        return max((float(rows[0]["seq/s/gpu"]) for rows in found if rows), default=0.0)

    def of(self, plan: Plan) -> float:
        """Requests/s per device of a plan, with the best of its batches."""
        size = (plan.prompts, plan.tokens) if plan.prompts else None
        rows = self.rows("disagg" if plan.prompts else "agg", (plan.ways,), size)
        return float(rows[0]["seq/s/gpu"]) if rows else 0.0

    def ungathered(self) -> float:
        """Requests/s per device of its best one engine that takes at most one prompt into a step, with every step
        counted in TPOT, where it leaves three out of a batch's with prompts."""
        from aiconfigurator.sdk.backends.base_backend import BaseBackend
        from aiconfigurator.sdk.backends.trtllm_backend import TRTLLMBackend

        own = TRTLLMBackend._tpot_mix_steps
        TRTLLMBackend._tpot_mix_steps = BaseBackend._tpot_mix_steps
        try:
            return max(self._one_by_one(ways) for ways in DEGREES[self.case.model])
        finally:
            TRTLLMBackend._tpot_mix_steps = own

    def _one_by_one(self, ways: int) -> float:
        slo, best = self.case.slo, 0.0
        task = self._task("agg", ("agg",), (ways,), None)
        split = ways if "a3b" in self.case.model else 1
        for budget in (BUDGETS[0], LENGTHS[self.case.load][0]):
            for batch in (*range(1, 16), *range(16, RUNNING, 8)):
                try:
                    row = task.run_single_agg(tp=ways, moe_tp=split, batch_size=batch, ctx_tokens=budget)
                except RuntimeError:  # no memory for more
                    break
                if row["ttft"] <= 1e3 * (slo.ttft or 0) and row["tpot"] <= 1e3 * (slo.tpot or 0):
                    best = max(best, float(row["seq/s/gpu"]))
        return best

    def winner(self, mixed: bool = False) -> str:
        return "aggregated" if self.best("aggregated") >= self.best("disaggregated", mixed) else "disaggregated"


# ---- ours
@dataclass(frozen=True)
class Slower:
    """Steps so many times as long."""

    cost: Cost
    factor: float

    def seconds(self, step: StepWork) -> float:
        return self.cost.seconds(step) * self.factor

    def price(self, step: StepWork) -> Price:
        return self.cost.price(step)._replace(seconds=self.seconds(step))


@cache
def source(model: str, ways: int, pools: bool) -> CostsByRole:
    made = known({"": f"{PREFIX}{SYSTEM}/{BACKEND}"}, ways, DecoderShape.of(config_of(str(SHAPES / model))))
    return replace(made, cost=lambda role, _: Slower(made.cost(role, None), SLOWER[role])) if pools else made


def question(case: Case, plan: Plan, guess: float, cv: float, precision: float) -> Question:
    prompt, new = LENGTHS[case.load]
    slo = case.slo
    assert slo.ttft is not None and slo.tpot is not None
    rate = max(1.0, guess * plan.devices)
    n = math.ceil(max(300, rate * max(QUEUES * slo.ttft, LIVES * (slo.ttft + new * slo.tpot))))
    load = Load(lengths(f"fixed:prompt={prompt},new={new}"), n, rate, cv)
    setting = ServerSetting(max_running=RUNNING, prefix_cache=False, link=LINK)
    return Question(
        load, slo, lambda choice: source(case.model, choice.ways, bool(plan.prompts)), setting, precision=precision
    )


def ours(case: Case, plan: Plan, guess: float, cv: float = 1.0, precision: float = 0.02) -> float:
    """Requests/s per device within the targets for 90 %, with the best of our budgets; 0: at no rate."""
    best = 0.0
    for budget in BUDGETS if not plan.prompts else (PROMPTS_EACH,):
        choice = Choice(plan.place, f"sarathi:budget={budget}", "", plan.ways)
        asked = question(case, plan, max(best, guess), cv, precision)
        few = replace(asked, load=replace(asked.load, requests=4))
        try:
            if few.at(choice, TRICKLE).share(case.slo) < 1:
                continue
            if best and asked.at(choice, best * plan.devices).share(case.slo) < 0.9:
                continue
            best = max(best, asked.goodput(asked.scenario(choice), max(best, guess) * plan.devices).rate / plan.devices)
        except UserError as error:  # the weights do not fit
            print(f"  {plan}: {error}", file=sys.stderr)
    return best


@dataclass
class Verdict:
    """What both say of a case. `shared`: [plan, theirs, ours] of what both can build."""

    case: Case
    theirs: str
    ours: str
    margins: tuple[float, float]  # aggregated over disaggregated, theirs and ours
    tau: float
    shared: list[tuple[Plan, float, float]]
    mixed: str  # theirs, where pools may have different degrees
    why: str = ""
    seconds: float = 0.0


def judge(case: Case, precision: float) -> Verdict:
    started = time.process_time()
    them = Theirs(case)
    shared = [(plan, them.of(plan), ours(case, plan, them.of(plan), precision=precision)) for plan in plans(case)]
    best = {mode: max((one for one in shared if one[0].mode == mode), key=lambda one: one[2]) for mode in MODES}
    mine = {mode: best[mode][2] for mode in MODES}
    winner = max(MODES, key=lambda mode: mine[mode])
    theirs = {mode: them.best(mode) for mode in MODES}
    verdict = Verdict(
        case, them.winner(), winner, (ratio(theirs), ratio(mine)),
        tau([one[1] for one in shared], [one[2] for one in shared]), shared, them.winner(mixed=True),
    )  # fmt: skip
    if verdict.theirs != verdict.ours:
        plain = Theirs(case, plain=True)
        steady = {mode: ours(case, best[mode][0], mine[mode], STEADY, precision) for mode in MODES}
        unaided = {mode: plain.best(mode) for mode in MODES}
        even = {**unaided, "aggregated": them.ungathered()}
        verdict.why = f"{reason(verdict, ratio(steady), ratio(unaided), ratio(even))}; {replayed(case, them)}"
    verdict.seconds = time.process_time() - started
    return verdict


MODES = ("aggregated", "disaggregated")


def ratio(worth: dict[str, float]) -> float:
    """Aggregated over disaggregated."""
    return worth["aggregated"] / worth["disaggregated"] if worth["disaggregated"] else math.inf


def replayed(case: Case, them: Theirs) -> str:
    """What becomes of its one engine's targets in our simulator, at its rate and with its budget."""
    plan = max((one for one in plans(case) if not one.prompts), key=them.of)
    row = them.rows("agg", (plan.ways,))[0]
    choice = Choice(plan.place, f"sarathi:budget={int(row['ctx_tokens'])}", "", plan.ways)
    said = []
    for name, cv in (("steady", STEADY), ("Poisson", 1.0)):
        asked = question(case, plan, them.of(plan), cv, 0.02)
        found = asked.at(choice, them.of(plan) * plan.devices).numbers(case.slo)
        said.append(f"{1e3 * found['tpot_p90_s']:.0f} ms ({name})")
    return f"its one engine, budget {row['ctx_tokens']:.0f}, TPOT {row['tpot']:.0f} ms: simulated {', '.join(said)}"


def reason(verdict: Verdict, steady: float, unaided: float, even: float) -> str:
    """Which difference, taken away, brings the two together."""
    said = []
    if (steady >= 1) == (verdict.theirs == "aggregated"):
        said.append(f"bursts: with steady arrivals ours is {steady:.2f}, and they agree")
    if (unaided >= 1) == (verdict.ours == "aggregated"):
        said.append(f"allowances for queues: without them theirs is {unaided:.2f}, and they agree")
    said.append(f"with no more than a prompt per step, all of them counted, and no allowances, theirs is {even:.2f}")
    if len(said) == 1:
        said.append(f"neither alone (ours, steady arrivals: {steady:.2f}; theirs, no allowances: {unaided:.2f})")
    return "; ".join(said)


def tau(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Kendall's tau-b; equal numbers are ties."""
    from scipy.stats import kendalltau

    return float(kendalltau(xs, ys).statistic)


def table(found: Sequence[Verdict]) -> str:
    rows = ["| case | theirs | ours | agg/disagg, theirs | ours | tau | configurations | why they differ |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for one in found:
        rows.append(f"| {one.case} | {one.theirs} | {one.ours} | {one.margins[0]:.2f} | {one.margins[1]:.2f} "
                    f"| {one.tau:.2f} | {len(one.shared)} | {one.why} |")  # fmt: skip
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: [int(part) for part in text.split(",")], help="From 1 on.")
    parser.add_argument("--precision", type=float, default=0.02)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        import aiconfigurator  # noqa: F401
    except ImportError:
        print("error: aiconfigurator is not installed: make silicon", file=sys.stderr)  # fmt: skip
        return 2
    found = []
    for number, case in enumerate(CASES, 1):
        if args.cases is None or number in args.cases:
            found.append(judge(case, args.precision))
            print(f"{number}: {case}: {found[-1].theirs}, {found[-1].ours}, tau {found[-1].tau:.2f}, "
                  f"{found[-1].seconds:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
            if args.out is not None:
                args.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")
    same = sum(one.theirs == one.ours for one in found)
    every = tau_within(found)
    moved = sum(one.mixed != one.theirs for one in found)
    print(f"{table(found)}\n\nthe same winner in {same} of {len(found)}; Kendall's tau within cases {every:.2f}, "
          f"of pools alone {tau_within(found, pools=True):.2f}; "
          f"pools of different degrees would change {moved} of their winners; "
          f"{sum(one.seconds for one in found):.0f} s")  # fmt: skip
    return 0 if same >= ENOUGH * len(found) / len(CASES) and every >= TAU else 1


def tau_within(found: Sequence[Verdict], pools: bool = False) -> float:
    """Tau over the pairs of configurations of all cases, where both are of one case, ties left out as in tau-a."""
    agree = pairs = 0
    for one in found:
        shared = [each for each in one.shared if each[0].prompts or not pools]
        for i, (_, a, x) in enumerate(shared):
            for _, b, y in shared[:i]:
                if a == b and x == y:
                    continue
                pairs += 1
                agree += 1 if (a > b) - (a < b) == (x > y) - (x < y) else -1
    return agree / pairs if pairs else math.nan


if __name__ == "__main__":
    sys.exit(main())
