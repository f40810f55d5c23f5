"""`phasewise simulate`: runs a server under a load in virtual time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise.cli import show
from phasewise.cli.asked import TARGETS, Targets
from phasewise.cli.guesses import DEPTHS, Guesses
from phasewise.cli.options import parse_bytes, spread
from phasewise.cli.progress import counting
from phasewise.cli.units import doubts
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.plan.arrivals import Load
    from phasewise.plan.layout import Layout
    from phasewise.plan.setting import CostsByRole, ServerSetting


@dataclass(frozen=True)
class CostSource:
    """The source of step costs: a profile of this machine, or devices and a model's sizes."""

    profile: Annotated[Path | None, typer.Option(help="A profile that `phasewise profile` has written.")] = None
    recipe: Annotated[str, typer.Option(help="Recipe of the profile. Default: its first.")] = ""
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE | ROLE=DEVICE,...",
            help="Devices: a100, h100 ..., a FILE.toml of yours, or measured ones as aiconfigurator:SYSTEM/BACKEND.",
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(help="With --device: the model. A directory with its config.json is enough.")
    ] = None
    ways: Annotated[
        int, typer.Option(min=1, help="Devices that share every layer of a worker (tensor parallelism).")
    ] = 1
    stages: Annotated[
        int, typer.Option(min=1, help="Stages of a worker, each with a part of the layers (pipeline parallelism).")
    ] = 1

    layout: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE=WAYSxSTAGES,...",
            help="With --device: degrees per role, such as prefill=4x1,decode=2x2 (tensor x pipeline parallelism).",
        ),
    ] = None

    def source(self, layouts: Sequence[Layout] = ()) -> CostsByRole:
        """The source of costs. `layouts`: of roles whose degrees are others than --ways and --stages, instead of those
        of --layout. Raises UserError for options that do not go together."""
        from phasewise.load import config_of
        from phasewise.plan import layout, setting
        from phasewise.plan.profile import Profile
        from phasewise.plan.shape import DecoderShape

        if (self.profile is None) == (self.device is None):
            raise UserError("costs come from --profile FILE, or from --device NAME with --model: give one of the two")
        if self.profile is not None:
            if self.ways > 1 or self.stages > 1 or self.model is not None or self.layout is not None:
                raise UserError(
                    "a profile is of one model and one machine: leave --ways, --stages, --layout and --model out"
                )
            return setting.measured(Profile.load(self.profile), self.recipe)
        if self.model is None:
            raise UserError("--device needs --model: a name, or a directory with config.json")
        if self.recipe:
            raise UserError("recipes are measured: --recipe goes with --profile")
        assert self.device is not None
        if not layouts and self.layout is not None:
            layouts = layout.parse(self.layout)
        shape = DecoderShape.of(config_of(self.model))
        return setting.known(setting.devices(self.device), self.ways, shape, self.stages, layouts)

    def about(self) -> list[str]:
        """Notes on a profile that does not fit this machine."""
        from phasewise.bench.machine import cpu
        from phasewise.plan.profile import Profile

        return [] if self.profile is None else Profile.load(self.profile).check(cpu(), None)


@dataclass(frozen=True)
class Simulated:
    """The load."""

    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 1000
    workload: Annotated[
        str,
        typer.Option(
            metavar="KIND[:KNOB=VALUE,...]",
            help="Lengths of requests: lognormal, fixed:prompt=,new=, shared:prefix=,prompt=,new=, "
            "turns:users=,turns=,system=,prompt=,new=, trace:path=,scale= or mooncake:path=,scale=.",
        ),
    ] = "lognormal"
    rate: Annotated[
        float | None, typer.Option(help="Requests per second. Default: the trace's own times, else all at once.")
    ] = None
    cv: Annotated[
        float,
        typer.Option(help="Coefficient of variation of the gaps between arrivals: 1 is Poisson, more is burstier."),
    ] = 1.0
    context: Annotated[int, typer.Option(min=2, help="Context of the model. Longer requests are cut to it.")] = 1 << 20
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths, arrivals and the choice of replicas.")] = 0

    def load(self) -> Load:
        from phasewise.bench.workloads import lengths
        from phasewise.plan.arrivals import Load

        return Load(lengths(self.workload), self.requests, self.rate, self.cv, self.seed, self.context)


@dataclass(frozen=True)
class Served:
    """The server that is simulated."""

    schedule: Annotated[str | None, typer.Option(metavar="METHOD", help="A method as `phasewise serve` takes it.")] = (
        None
    )
    place: Annotated[str | None, typer.Option(metavar="METHOD", help="A method as `phasewise serve` takes it.")] = None
    replicas: Annotated[int, typer.Option(min=1, help="Number of such servers. Each request goes to a random one.")] = 1
    kv_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="KV memory of a server. Default: what `serve` would take, or what its devices have left.",
        ),
    ] = None
    max_running: Annotated[int, typer.Option(min=1, help="Most requests in one step.")] = 64
    link: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes per second between workers. Default: no limit.")
    ] = None
    link_ms: Annotated[float, typer.Option(min=0.0, help="Latency between workers in milliseconds.")] = 0.0
    die: Annotated[
        list[str] | None, typer.Option(metavar="WORKER@SECONDS", help="Let a worker die at this time. May be repeated.")
    ] = None
    revive_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds until a dead worker is replaced.")] = 1000.0
    accept: Annotated[
        float | None, typer.Option(help="Probability that a guess is accepted if all before it were, from 0 to 1.")
    ] = None
    draft_ms: Annotated[
        float, typer.Option(min=0.0, help="Milliseconds that the drafter takes per guess; 0 for one that copies.")
    ] = 0.0
    depths: Annotated[
        str | None,
        typer.Option(metavar="N,...", help=f"Guesses a step: simulate takes one, plan tries all, by default {DEPTHS}."),
    ] = None

    @property
    def guesses(self) -> Guesses:
        return Guesses(self.accept, self.draft_ms, self.depths)

    def setting(self, shared: bool) -> ServerSetting:
        """`shared`: whether prompts have anything in common; if not, a prefix cache would be searched in vain."""
        from phasewise.options import DEFAULTS
        from phasewise.plan.link import LOCAL, Link
        from phasewise.plan.setting import ServerSetting

        link = LOCAL if self.link is None else Link(parse_bytes(self.link))
        return ServerSetting(
            self.schedule or DEFAULTS["schedule"], self.place or DEFAULTS["place"],
            None if self.kv_bytes is None else parse_bytes(self.kv_bytes), self.max_running,
            shared, link=Link(link.bandwidth, self.link_ms / 1e3), revive=self.revive_ms / 1e3,
        )  # fmt: skip


COSTS, SIMULATED, SERVED = CostSource(), Simulated(), Served()


@spread
def simulate(
    find_goodput: Annotated[
        bool, typer.Option("--goodput", help="Find the highest rate at which 90 % of the requests meet the targets.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the numbers into this file, as JSON.")] = None,
    costs: CostSource = COSTS,
    asked: Simulated = SIMULATED,
    served: Served = SERVED,
    targets: Targets = TARGETS,
) -> None:  # fmt: skip
    """Simulate a server under a load in virtual time: TTFT, TPOT and goodput, without running the model.

    Schedulers, placements, admission and the prefix cache are the ones that serve. Only step times are numbers, from a
    profile of this machine or a device file. docs/simulator.md says what is modelled.

    [bold]Examples[/]

      phasewise simulate --profile profile.json --rate 2 --ttft 800 --tpot 80
      phasewise simulate --profile profile.json --place disaggregated --workload trace:path=azure.csv,scale=0.1
      phasewise simulate --device h100 --model path/to/model --place splitwise:prompt=4,token=4 --rate 20 --link 50G
      phasewise simulate --device prefill=h100,decode=a100 --model DIR --place disaggregated --goodput --tpot 50
      phasewise simulate --device aiconfigurator:h100_sxm/trtllm --model DIR --ways 2 --rate 20
    """
    slo = targets.slo()
    if find_goodput and not slo:
        raise UserError("--goodput needs targets: add --ttft MS, --tpot MS, --tbt MS or several of them")
    from phasewise.plan import setting as settings
    from phasewise.plan.simulate import goodput, run

    load = asked.load()
    drafts = served.guesses.drafts(served.guesses.one(), asked.seed)
    setting = replace(served.setting(load.shares), drafts=drafts)
    source = costs.source()
    scenario = setting.scenario(source, served.replicas, settings.deaths(served.die or ()), asked.seed)
    _check_roles(scenario.policy(), costs)
    jobs = load.jobs(slo)
    for line in [*doubts(targets, served.link), *costs.about()]:
        print(f"note: {line}")
    started = time.perf_counter()
    with counting("requests", len(jobs)) as tell:
        outcome = run(scenario, jobs, tell)
    seconds = time.perf_counter() - started
    numbers = outcome.numbers(slo)
    _tell(numbers, f"{served.place or 'one engine'}, {asked.workload}", seconds)
    if find_goodput:
        best = goodput(scenario, load, slo)
        devices = sum(source.devices(worker.spec.role) for cluster in outcome.clusters for worker in cluster.workers)
        numbers |= {"goodput_per_s": best.rate, "goodput_per_device_per_s": best.rate / devices}
        said = f"{'' if best.bounded else 'at least '}{best.rate:.3g} requests/s ({best.rate / devices:.3g} per device)"
        print(f"goodput: {said if best.rate > 1e-5 else 'none: the targets are missed at every rate'}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _check_roles(policy: Any, costs: CostSource) -> None:
    """Raises UserError for devices or degrees of a role that the placement does not have."""
    from phasewise.plan import layout
    from phasewise.plan import setting as settings

    if costs.device is not None:
        roles = sorted({spec.role for spec in policy.worker_specs()} if policy is not None else {"all"})
        settings.unknown_role(roles, settings.devices(costs.device))
        if costs.layout is not None:
            settings.unknown_role(roles, {one.role: costs.layout for one in layout.parse(costs.layout)})


def _tell(numbers: dict[str, Any], what: str, seconds: float) -> None:
    from phasewise.bench.report import milliseconds

    print(f"{what}: {numbers['requests']} requests on {numbers['workers']} workers\n")
    rows = [
        [name.upper(), *(milliseconds(numbers[f"{name}_p{q}_s"]) for q in (50, 90, 99))]
        for name in ("ttft", "tpot", "tbt")
        if f"{name}_p50_s" in numbers
    ]
    show.table(["", "p50", "p90", "p99"], rows)
    print(f"\n{numbers['requests_per_s']:.3g} requests/s, {numbers['output_tokens_per_s']:.4g} tokens/s, workers busy "
          f"{numbers['busy_share']:.0%} of the time, {numbers['failed']} failed")  # fmt: skip
    if "good_share" in numbers:
        print(f"within the targets: {numbers['good_share']:.1%}")
    if numbers["drafted"]:
        print(f"guesses: {numbers['accepted'] / numbers['drafted']:.0%} of {numbers['drafted']} held")
    small = {key: numbers[key] for key in ("handoffs", "preemptions", "prefix_hits", "workers_lost", "restarts")}
    said = ", ".join(f"{key} {value}" for key, value in small.items() if value)
    if said:
        print(said)
    for key, unit in (("joules", "J"), ("money", "$")):
        if numbers[key]:
            print(f"{key}: {numbers[key]:.4g} {unit}, {numbers[key] / max(1, numbers['requests']):.3g} per request")
    rate = numbers["requests"] / seconds * 60
    print(f"simulated {numbers['seconds']:.4g} s in {seconds:.2f} s: {rate:,.0f} requests a minute")
