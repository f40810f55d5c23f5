"""`phasewise profile`: measures step times on this machine for `phasewise simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise import recipes
from phasewise.cli import show
from phasewise.cli.loading import client
from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import counting, working
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.drive import Bench
    from phasewise.bench.latency import ServedRequest
    from phasewise.bench.prompts import Prompts
    from phasewise.bench.workloads import Shot
    from phasewise.plan.beside import Beside
    from phasewise.plan.profile import Grid, Profile
    from phasewise.plan.serving import Serving


@dataclass(frozen=True)
class How:
    """The amount of measuring."""

    threads: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Numbers of threads to measure with. Default: one, and all cores."),
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer sizes, each once, for a rough answer.")] = False
    alone: Annotated[
        bool,
        typer.Option(
            "--alone", help="Measure steps only: start no second process and no servers, which load the model again."
        ),
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0

    def counts(self) -> list[int]:
        """Numbers of threads. Raises UserError for what is none, or more than there are cores."""
        from phasewise.bench.machine import cores

        if self.threads is None:
            return sorted({1, cores()})
        try:
            found = [int(part) for part in self.threads.split(",")]
        except ValueError:
            found = []
        if not found or len(set(found)) < len(found) or not all(1 <= n <= cores() for n in found):
            raise UserError(
                f"threads={self.threads!r}: write different numbers from 1 to {cores()} (cores), such as 1,{cores()}"
            )
        return found

    @property
    def grid(self) -> Grid:
        from phasewise.plan.profile import QUICK, Grid

        return QUICK if self.quick else Grid()


HOW = How()


@spread
def profile(
    out: Annotated[Path, typer.Option(help="File for the measurements, as JSON.")] = Path("profile.json"),
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VERB=METHOD...", help="Measure this recipe too. May be repeated."),
    ] = None,
    how: How = HOW,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Measure this machine's step times by size, as a latency model for `phasewise simulate` and `plan`.

    Runs the real engine on steps of chosen sizes, fits a line to each kind of step (prefill, decode, both together) and
    checks it on sizes in between. Use a quiet machine. SmolLM2 takes about four minutes on two cores.

    [bold]Examples[/]

      phasewise profile --model smollm2 --out smollm2.json
      phasewise profile --quick --threads 1,2 --recipe long="evict=streaming store=int8"
    """
    engine.check()
    engine.on_the_processor("steps are timed")
    if engine.place is not None or engine.schedule is not None:
        raise UserError(
            "steps are measured in one engine, of sizes that profile chooses: leave --place, --schedule out"
        )
    from phasewise.bench.drive import Bench
    from phasewise.bench.prompts import random_prompts
    from phasewise.options import WITH_DRAFT

    how.counts()
    given = recipes.read(recipe or ())
    recipes.check(given)
    named = {"": engine.verbs} | {name: recipes.texts(engine.verbs, own, WITH_DRAFT) for name, own in given.items()}
    _one_row(named)
    with working(f"loading {engine.model}"):
        made = Bench.load(engine.model, engine.dtype, weights=engine.weights)
    taken = _take(made, engine, named, how)
    if not how.alone:
        taken = replace(taken, served=_served(taken, engine, random_prompts(made.model.config.vocab, how.seed)))
    taken.save(out)
    _tell(taken, out)


def _one_row(named: Mapping[str, Mapping[str, str]]) -> None:
    """Raise UserError for recipes that bring more than a row per token: their steps have no size of their own."""
    from phasewise.options import DEFAULTS, parse

    plain = type(parse({})["decode"])
    for name, verbs in named.items():
        if type(parse(verbs)["decode"]) is not plain:
            raise UserError(f"recipe {name or recipes.DEFAULT!r} does not decode with {DEFAULTS['decode']}, and "
                            "profiles know no other steps: leave decode, draft and verify out")  # fmt: skip


def _take(made: Bench, engine: EngineOptions, named: Mapping[str, Mapping[str, str]], how: How) -> Profile:
    import torch

    from phasewise.bench.bandwidth import reading
    from phasewise.bench.machine import describe
    from phasewise.bench.prompts import random_prompts
    from phasewise.engine.engine import Engine
    from phasewise.model.artefacts import fingerprint
    from phasewise.plan.interference import BusyWorker, around
    from phasewise.plan.profile import Measured, Measuring, Profile, flops
    from phasewise.plan.profiler import StepProfiler
    from phasewise.plan.shape import DecoderShape

    with working("measuring how fast memory is read, and arithmetic done"):
        limits = {"read_bytes_per_s": reading(3), "flops": flops(3)}
    model, found = made.model, list[Measured]()
    counts, grid = how.counts(), how.grid
    dtype = str(model.dtype).removeprefix("torch.")
    there = torch.get_num_threads()
    total = len(named) * len(counts) * grid.runs
    done = 0
    with counting("runs of steps", total) as bar, torch.inference_mode():

        def one() -> None:
            nonlocal done
            done += 1
            bar(done)

        for name, verbs in named.items():
            placed = made.engine(dict(verbs), engine.limits())
            assert isinstance(placed, Engine)
            for threads in counts:
                torch.set_num_threads(threads)
                run = Measuring(StepProfiler(placed, random_prompts(model.config.vocab, how.seed)), grid)
                try:
                    run.run(one)
                    beside: Beside = {}
                    shared: Beside = {}
                    if not how.alone:
                        like = BusyWorker(engine.model, dtype, verbs, engine.limits(), threads, weights=engine.weights)
                        beside, shared = around(run.profiler, like, grid.rounds)
                finally:
                    torch.set_num_threads(there)
                lines, held = run.lines()
                found.append(Measured(name, threads, dict(verbs), lines, held, placed.store.row_bytes, beside, shared))
    about = {"name": _name(engine.model), "hash": fingerprint(model), "dtype": dtype}
    about |= {} if engine.weights is None else {"weights": engine.weights}
    width = model.weight_bytes / (DecoderShape.of(model.config, 1.0).weight_bytes or 1.0)
    kv = found[0].row_bytes / DecoderShape.of(model.config, kv_width=1.0).row_bytes
    return Profile(describe(), about, DecoderShape.of(model.config, width, kv), limits, found)


def _served(taken: Profile, engine: EngineOptions, prompts: Prompts) -> dict[str, Serving]:
    """What servers add to steps, of one engine and of two workers, where steps were measured with their threads."""
    from phasewise.bench.machine import cores
    from phasewise.bench.server import serving
    from phasewise.cluster.policy import threads_each
    from phasewise.plan.search import places
    from phasewise.plan.serving import Asking

    try:
        load = client()
    except UserError as error:
        print(f"note: what servers add to steps is not measured: {error}")
        return {}
    found: dict[str, Serving] = {}
    have = {one.threads for one in taken.measured if not one.recipe}
    sizes = {"engine": (None, cores()), "workers": (next(iter(places(2)[1:]), None), threads_each(2))}
    for name, (place, threads) in sizes.items():
        if threads not in have or (name == "workers" and place is None):
            print(f"note: servers with {name} compute with {threads} threads, which were not measured: what they add "
                  "to steps is not known")  # fmt: skip
            continue

        with working(f"asking a server with {name}"), serving(replace(engine, place=place).served()) as url:

            def ask(shots: Sequence[Shot], at: str = url) -> Sequence[ServedRequest]:
                return load(at, shots, lambda done: None).served

            found[name] = Asking(ask, prompts, taken.of("", threads).cost).measure(name == "workers")
    return found


def _name(model: str) -> str:
    return Path(model).name if Path(model).exists() else model  # what is written names no place


def _tell(taken: Profile, out: Path) -> None:
    from phasewise.plan.profile import DOUBT

    show.title(f"Steps of {taken.model['name']}, {taken.model['dtype']}: errors on sizes that were held out")
    rows = [
        [
            one.recipe or recipes.DEFAULT,
            str(one.threads),
            kind,
            str(held.steps),
            f"{held.median:.1%}",
            f"{held.p90:.1%}",
        ]
        for one in taken.measured
        for kind, held in one.held_out.items()
    ]
    show.table(["recipe", "threads", "steps of", "held out", "median error", "p90"], rows)
    for one in taken.measured:
        whose = "another has one of its cores" if one.threads > 1 else "another has all cores, its own among them"
        _tell_slower(f"{one.threads} thread(s), beside another such process", one.beside)
        _tell_slower(f"{one.threads} thread(s), while {whose}", one.shared)
    for name, added in taken.served.items():
        print(f"a server with {name} adds {1e3 * added.lag:.1f} ms to a request; to a step with decodes "
              f"{1e3 * added.step:.2f} ms, {1e3 * added.token:.2f} for each token and {1e3 * added.request:.1f} for "
              "each prompt that it ends")  # fmt: skip
        _tell_slower(f"a server with {name}, busy with both phases", added.beside)
    print(f"\nmemory is read at {taken.limits['read_bytes_per_s'] / 1e9:.1f} GB/s, "
          f"arithmetic done at {taken.limits['flops'] / 1e9:.0f} GFLOP/s; written to {out}")  # fmt: skip
    for row in rows:
        if float(row[4].rstrip("%")) > 100 * DOUBT:
            print(
                f"doubtful: {row[2]} steps of {row[0]} with {row[1]} threads are off by {row[4]}: is the machine quiet?"
            )


def _tell_slower(where: str, slower: Beside) -> None:
    """Print how many times as long a step of each kind takes there beside steps of each other kind."""
    for mine, factors in slower.items():
        said = " and ".join(f"{factor:.2f} beside {theirs}s" for theirs, factor in factors.items())
        print(f"{where}: a {mine} takes {said} times as long")
