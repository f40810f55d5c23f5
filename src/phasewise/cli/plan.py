"""`phasewise plan`: from targets to a server's configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from phasewise.cli import show
from phasewise.cli.asked import TARGETS, Targets
from phasewise.cli.guesses import DRAFTER, drafter
from phasewise.cli.options import spread
from phasewise.cli.progress import counting
from phasewise.cli.replan import MISFIT, WATCHED, WatchedPlan, beside, watch
from phasewise.cli.simulate import COSTS, SERVED, SIMULATED, CostSource, Served, Simulated
from phasewise.cli.units import doubts
from phasewise.errors import UserError, near

if TYPE_CHECKING:
    from phasewise.plan import search
    from phasewise.plan.layout import Affinity, Layout
    from phasewise.plan.search import Assumption, Choice, Question, SearchSpace, Tried
    from phasewise.plan.setting import CostsByRole
    from phasewise.plan.slowdown import Slowdowns
    from phasewise.request.params import SLO

GOALS = ("goodput", "cost", "power", "price", "watts", "iso-cost", "iso-power")
SHOWN = 8  # choices of the table
SCHEDULES = "sarathi:budget=256|sarathi:budget=512|sarathi:budget=1024|sarathi:budget=2048|prefill_first"


@dataclass(frozen=True)
class PlanSpace:
    """The choices to try."""

    devices: Annotated[
        int, typer.Option(min=1, help="Number of devices; with --profile, number of machines like the profiled one.")
    ] = 1
    goal: Annotated[
        str,
        typer.Option(
            metavar="|".join(GOALS),
            help="Maximise requests within the targets per device (goodput), $/h (price) or W (watts) of all devices; "
            "per unit of money (cost) or joule (power) of those that are busy; or those of all servers that --budget "
            "has room for (iso-cost, iso-power).",
        ),
    ] = "goodput"
    places: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD|...", help="Placements to try, separated by |. Default: one engine, and pools of all sizes."
        ),
    ] = None
    schedules: Annotated[str, typer.Option(metavar="METHOD|...", help="Schedulers to try, separated by |.")] = SCHEDULES
    recipes: Annotated[
        str | None,
        typer.Option(metavar="NAME|...", help="Recipes of the profile to try, separated by |. Default: all of them."),
    ] = None
    degrees: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="With --device: numbers of devices that share every layer of a worker (tensor parallelism).",
        ),
    ] = "1"
    pipeline: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="With --device: numbers of stages that a worker's layers are divided into (pipeline parallelism).",
        ),
    ] = "1"
    per_role: Annotated[
        bool, typer.Option("--per-role", help="With --device: let each role of a placement have its own degrees.")
    ] = False
    kinds: Annotated[
        str | None,
        typer.Option(metavar="DEVICE|...", help="Kinds of devices that each role may have, separated by |."),
    ] = None
    layouts: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT|...",
            help="Try these alone, such as prefill=4x1,decode=2x2|prefill=2x1,decode=1x1 (--layout of simulate).",
        ),
    ] = None
    node: Annotated[int, typer.Option(min=0, help="Devices of a node. 0: all are on one.")] = 0
    affinity: Annotated[
        str, typer.Option(metavar="high|low", help="low: KV does not leave a node (--link is then one within a node).")
    ] = "high"
    budget: Annotated[
        float | None,
        typer.Option(
            help="The most $/h (--goal price), or W (watts), of a server's devices; of all servers' with --goal "
            "iso-cost or iso-power."
        ),
    ] = None
    slowdown: Annotated[
        str | None,
        typer.Option(
            metavar="WAYSxSTAGES@DEVICE",
            help="Instead of targets: Splitwise's nine limits of slow-downs against a lone request on such a machine.",
        ),
    ] = None
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Measure every choice to the end, also those that cannot be the best.")
    ] = False
    draft: Annotated[str, typer.Option(metavar="METHOD", help="With --accept: the drafter, one with a knob `k`.")] = (
        DRAFTER
    )

    def check(self) -> None:
        """Raises UserError for options that do not go together."""
        if self.goal not in GOALS:
            raise UserError(f"unknown goal {self.goal!r}. {near(self.goal, GOALS)}")
        if self.affinity not in ("high", "low"):
            raise UserError(f"unknown affinity {self.affinity!r}: choose high or low")
        if self.budget is not None and self.goal not in GOALS[3:]:
            raise UserError(
                "--budget is of --goal price or iso-cost, in $/h, or of --goal watts or iso-power: name one"
            )

    def judged(self, targets: Targets) -> SLO:
        """The targets; none where slow-downs are judged. Raises UserError."""
        if self.slowdown is None:
            return targets.asked()
        if any(target is not None for target in (targets.ttft, targets.tpot, targets.tbt)):
            raise UserError("--slowdown takes the place of targets: leave --ttft, --tpot and --tbt out")
        return targets.slo()

    def slowdowns(self, costs: CostSource) -> Slowdowns | None:
        """Limits against a lone request on the machine that --slowdown names. Raises UserError."""
        from phasewise.plan import layout
        from phasewise.plan.slowdown import Slowdowns

        if self.slowdown is None:
            return None
        if costs.profile is not None:
            raise UserError("--slowdown names a device: it goes with --device, not with --profile")
        (alone,) = layout.parse(f"all={self.slowdown}")
        kind = alone.device or costs.device
        return Slowdowns(replace(costs, device=kind, layout=None).source([alone]).cost("all", None))

    def own_layouts(self) -> list[Layout]:
        """Layouts that each role may have; none where all roles have the same. Raises UserError."""
        from phasewise.plan.layout import Layout

        kinds = self.kinds.split("|") if self.kinds is not None else [""]
        if not self.per_role and self.kinds is None:
            return []
        return [Layout("", ways, stages, kind) for ways in self.ways() for stages in self.stages() for kind in kinds]

    def spaces(self, made: SearchSpace) -> list[SearchSpace]:
        """The search space, or one for each layout that is given. Raises UserError."""
        from phasewise.plan import layout, search

        if self.layouts is None:
            return [replace(made, layouts=self.own_layouts())]
        given = [layout.parse(text) for text in self.layouts.split("|")]
        found = []
        for one in given:
            roles = {each.role for each in one}
            places = [place for place in made.places if set(search.workers(place)) == roles]
            if not places:
                raise UserError(f"no placement has the roles {', '.join(sorted(roles))}: name one with --places")
            found.append(replace(made, places=places, layouts=one))
        return found

    def ways(self) -> list[int]:
        """Raises UserError."""
        return _numbers("degrees", self.degrees, "devices")

    def stages(self) -> list[int]:
        """Raises UserError."""
        return _numbers("pipeline", self.pipeline, "stages")


def _numbers(name: str, text: str, what: str) -> list[int]:
    found = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if not found or min(found) < 1 or len(found) < len(text.split(",")):
        raise UserError(f"{name}={text!r}: write numbers of {what}, such as 1,2,4")
    return found


SPACE = PlanSpace()


@spread
def plan(
    written: WatchedPlan = WATCHED,
    space: PlanSpace = SPACE,
    costs: CostSource = COSTS,
    asked: Simulated = SIMULATED,
    served: Served = SERVED,
    targets: Targets = TARGETS,
) -> None:
    """Plan servers for a workload and its targets: search in the simulator, explain, and write a configuration.

    For every placement, pool size, schedule, degree of parallelism, recipe and
    (with --accept) number of guesses, bisection finds the highest rate at which
    90 % of the requests meet all targets. The best choice per device (or joule,
    or unit of money) is repeated as often as --rate needs or --devices allow.
    Then each assumption is made worse, to show what the choice depends on.

    [bold]Examples[/]

      phasewise profile pocket --out profile.json && phasewise plan --profile profile.json --ttft 500 --tpot 50
      phasewise plan --device a100 --devices 8 --model path/to/model --ttft 400 --tpot 40 --degrees 1,2,4 --rate 20
      phasewise plan --device a100 --devices 8 --model path/to/model --ttft 400 --degrees 1,2 --pipeline 1,2,4
      phasewise plan --device a100 --devices 8 --model DIR --ttft 400 --degrees 1,2,4 --pipeline 1,2 --per-role
      phasewise plan --kinds "h100|a100" --devices 8 --model DIR --ttft 400 --goal price --budget 12
      phasewise plan --kinds "h100|a100|h100-350w" --degrees 8 --devices 64 --model DIR --slowdown 8x1@a100
          --places "splitwise:prompt=3,token=2|splitwise:prompt=2,token=3|colocated" --goal iso-cost --budget 190
      phasewise plan --device a100 --model path/to/model --tpot 20 --accept 0.6 --requests 2000
      phasewise plan --profile profile.json --ttft 500 --tpot 50 --replan http://localhost:8000
      phasewise plan --device h100 --devices 4 --goal power --model DIR --workload trace:path=azure.csv --ttft 1000
    """
    slo = space.judged(targets)
    space.check()
    if space.slowdown is not None and written.replan is not None:
        raise UserError("a plan by --slowdown cannot be watched: servers count requests within targets alone")
    from phasewise.bench.machine import cores
    from phasewise.plan import search

    question, where = _asked(space, costs, asked, served, slo)
    for line in [*doubts(targets, served.link), *costs.about()]:
        print(f"note: {line}")
    if written.replan is not None:
        raise typer.Exit(0 if watch(written, question, where) else MISFIT)
    with counting("choices", len(list(where.choices()))) as tell:
        found = search.search(where, question, tell, prune=not space.exhaustive, processes=cores())
    best, other = found[0], search.runner_up(found)
    iso = question.goal in search.ISO
    count = question.copies(best.choice, best.devices) if iso else search.replicas(best, space.devices, asked.rate)
    _say(found, other, space.goal, count)
    if slo.ttft is not None and asked.requests < 10 * slo.ttft * best.rate:
        print(f"note: {asked.requests} requests at that rate are over after {asked.requests / best.rate:.2g} s, too "
              "soon for a queue to show: ask for more (--requests)")  # fmt: skip
    lines = search.sensitivity(best, other, _assumptions(question), cores())
    print("\nunder other assumptions, the choice keeps this share of its rate")
    for name, worth, changes in lines:
        print(f"  {worth:5.2f} {name}{'; the runner-up would be better' if changes else ''}")
    config = written.config
    draft = drafter(space.draft, best.choice.depth) if best.choice.depth else None
    _write(config, best, count, targets, costs, draft)
    _keep(config, best, question, asked.rate and asked.rate / count)
    print(f"\nserve it: phasewise serve --config {config}")


def _places(costs: CostSource, space: PlanSpace) -> list[str]:
    """With a profile, all that one machine can be divided into."""
    from phasewise.plan.profile import Profile
    from phasewise.plan.search import places

    if costs.profile is None:
        return places(space.devices)
    return places(int(Profile.load(costs.profile).machine.get("cores", 1)), machine=True)


def _asked(
    space: PlanSpace, costs: CostSource, asked: Simulated, served: Served, slo: SLO
) -> tuple[Question, search.Space]:
    """What is judged by what, and what is tried. Raises UserError."""
    from phasewise.plan import search

    load, depths = asked.load(), served.guesses.several()
    for depth in filter(None, depths):
        drafter(space.draft, depth)
    setting = replace(served.setting(load.shares), drafts=served.guesses.drafts(0, asked.seed))
    question = search.Question(
        load, slo, _sources(costs, space), setting, cast("search.Goal", space.goal),
        budget=math.inf if space.budget is None else space.budget, slowdowns=space.slowdowns(costs),
    )  # fmt: skip
    where = search.SearchSpace(
        space.devices, space.places.split("|") if space.places else _places(costs, space),
        space.schedules.split("|"), _recipes(costs, space), space.ways(), depths, space.stages(),
        node=space.node, affinity=cast("Affinity", space.affinity),
    )  # fmt: skip
    return question, search.joined(space.spaces(where))


def _sources(costs: CostSource, space: PlanSpace) -> Callable[[Choice], CostsByRole]:
    """Costs of each choice, made once."""
    degrees = space.ways() != [1] or space.stages() != [1]
    if costs.profile is not None and (degrees or space.own_layouts() or space.layouts is not None):
        raise UserError("a profile is of whole machines: leave --degrees, --pipeline, --kinds and --layouts out")

    if costs.device is None and costs.profile is None and space.kinds is not None:
        costs = replace(costs, device=space.kinds.split("|")[0])

    @cache
    def of(recipe: str, ways: int, stages: int, roles: tuple[Layout, ...]) -> CostsByRole:
        return replace(costs, recipe=recipe or costs.recipe, ways=ways, stages=stages).source(roles)

    def source(choice: Choice) -> CostsByRole:
        return of(choice.recipe, choice.ways, choice.stages, choice.roles)

    return source


def _recipes(costs: CostSource, space: PlanSpace) -> list[str]:
    from phasewise.plan.profile import Profile

    if costs.profile is None:
        if space.recipes is not None:
            raise UserError("recipes are measured: --recipes goes with --profile")
        return [""]
    known = list(dict.fromkeys(one.recipe for one in Profile.load(costs.profile).measured))
    return space.recipes.split("|") if space.recipes is not None else [costs.recipe] if costs.recipe else known


def _assumptions(question: Question) -> list[Assumption]:
    """What is most often otherwise than one thinks."""
    from phasewise.plan.search import Assumption

    load, setting = question.load, question.setting
    found = [
        Assumption(
            "arrivals come in bursts (gaps vary twice as much)", replace(question, load=replace(load, cv=2 * load.cv))
        ),
        Assumption("another draw of lengths and arrivals", replace(question, load=replace(load, seed=load.seed + 1))),
    ]
    found.append(
        Assumption("the load lasts twice as long", replace(question, load=replace(load, requests=2 * load.requests)))
    )
    for name, target in (("TTFT", "ttft"), ("TPOT", "tpot"), ("P99 TBT", "tbt")):
        if (value := getattr(question.slo, target)) is not None:
            tighter = replace(question.slo, **{target: 0.8 * value})
            found.append(Assumption(f"the target of {name} is a fifth tighter", replace(question, slo=tighter)))
    if setting.kv_bytes is not None:
        half = replace(setting, kv_bytes=setting.kv_bytes // 2)
        found.append(Assumption("half the KV bytes", replace(question, setting=half)))
    if setting.link.bandwidth != float("inf"):
        slower = replace(setting, link=replace(setting.link, bandwidth=setting.link.bandwidth / 4))
        found.append(Assumption("the link is four times slower", replace(question, setting=slower)))
    drafts = setting.drafts
    if drafts.accept:
        worse = replace(setting, drafts=replace(drafts, accept=0.8 * drafts.accept))
        found.append(Assumption("guesses hold a fifth less often", replace(question, setting=worse)))
    return found


def _say(found: Sequence[Tried], other: Tried | None, goal: str, count: int) -> None:
    unit = {
        "goodput": "requests/s per device", "cost": "requests per unit of money", "power": "requests per joule",
        "price": "requests/s per $/h", "watts": "requests/s per W", "iso-cost": "requests/s within the budget",
        "iso-power": "requests/s within the budget",
    }[goal]  # fmt: skip
    body = [
        [str(one.choice), str(one.devices), "-" if one.pruned else f"{one.rate:.3g}",
         f"less than {one.worth:.3g}" if one.pruned else f"{one.worth:.3g}"]
        for one in found[:SHOWN]
    ]  # fmt: skip
    show.table(["choice", "devices", "requests/s in time", unit], body)
    if len(found) > SHOWN:
        print(f"... and {len(found) - SHOWN} more")
    best = found[0]
    print(
        f"\nchosen: {count} x {best.choice}: {count * best.rate:.3g} requests/s in time, {count * best.devices} devices"
    )
    if other is not None and other.worth:
        print(f"runner-up: {other.choice}: {other.worth / best.worth:.2f} of the {unit}")


def _write(path: Path, best: Tried, count: int, targets: Targets, costs: CostSource, draft: str | None) -> None:
    """Options of one server as TOML. Raises UserError."""
    from phasewise.plan.profile import Profile

    own: dict[str, object] = {"model": costs.model}
    if costs.profile is not None:
        profile = Profile.load(costs.profile)
        own = {
            "model": profile.model["name"],
            "dtype": profile.model.get("dtype"),
            **profile.of(best.choice.recipe).methods,
        }
    own |= {"place": best.choice.place, "schedule": best.choice.schedule, "draft": draft or "none",
            "slo-ttft": targets.ttft, "slo-tpot": targets.tpot}  # fmt: skip
    about = [
        f"# phasewise plan: {count} such servers, each {best.rate:.3g} requests/s within the targets, by simulation"
    ]
    if best.choice.recipe:
        about.append(f"# the methods are those of the recipe {best.choice.recipe!r}")
    if best.choice.ways * best.choice.stages > 1:
        shared = f"# every worker on {best.choice.ways * best.choice.stages} devices"
        about.append(shared + (f": {best.choice.stages} stages of the layers" if best.choice.stages > 1 else ""))
    for one in best.choice.roles:
        kind = f" {one.device}" if one.device else ""
        about.append(f"# {one.role} workers: {one.ways} devices{kind} per stage, {one.stages} stages")
    lines = about + [f"{key} = {json.dumps(value)}" for key, value in own.items() if value is not None]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def _keep(config: Path, best: Tried, question: Question, rate: float | None) -> None:
    """What the plan assumes, for --replan."""
    from phasewise.plan.watch import Assumed

    jobs = question.load.jobs(question.slo)
    prompt, new = (sum(numbers) / len(jobs) for numbers in zip(*((job.prompt_len, job.new) for job in jobs)))
    slo = question.slo
    Assumed(best.choice, rate, best.rate, prompt, new, slo.ttft, slo.tpot, slo.tbt).save(beside(config))
