"""`phasewise bench savers`: times methods that save KV, reads or layers beside dense decoding."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli import show
from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import counting, working
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.savers import BatchLoad, Savers
    from phasewise.bench.worth import Worth


@dataclass(frozen=True)
class Loaded:
    """The load that every setting decodes."""

    tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of each request.")] = 4096
    batch: Annotated[str, typer.Option(metavar="B,...", help="Numbers of requests that decode together.")] = "1,4,8"
    new: Annotated[int, typer.Option(min=1, help="Tokens that every request decodes in a round.")] = 16
    rounds: Annotated[int, typer.Option(min=1, help="Number of interleaved rounds.")] = 5
    shape: Annotated[
        str | None, typer.Option(metavar="LAYERSxHIDDEN", help="Use random weights of this shape instead of --model.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompt.")] = 0

    def load(self) -> BatchLoad:
        """Raises UserError for a `batch` that is none."""
        from phasewise.bench.savers import BatchLoad

        return BatchLoad(self.tokens, show.batches(self.batch), self.new, self.rounds)


@dataclass(frozen=True)
class SaversFiles:
    """Where results go besides the terminal."""

    csv: Annotated[Path | None, typer.Option(help="Write every turn into this CSV file as soon as it is measured.")] = (
        None
    )
    plot: Annotated[Path | None, typer.Option(help="Draw figures beside this image's name: one per batch.")] = None
    write: Annotated[Path | None, typer.Option(help="Put the tables into a page, such as docs/results/savers.md.")] = (
        None
    )

    def check(self, section: str) -> None:
        """Raise UserError for what can be seen before anything is measured."""
        if self.plot is not None and find_spec("matplotlib") is None:
            raise UserError("plots are drawn by matplotlib, which is not installed: pip install 'phasewise[bench]'")
        if self.write is not None:
            _page(self.write, section, "")


LOADED, WRITTEN = Loaded(), SaversFiles()


@spread
def savers(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VERB=METHOD]...",
            help="Settings to compare. neutral: all methods at their neutral setting; work: all at work. "
            "Default: both.",
        ),
    ] = None,
    asked: Loaded = LOADED,
    written: SaversFiles = WRITTEN,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Time methods that save KV, reads or layers beside dense decoding, and compare with the bytes they save.

    Prompts are random tokens, computed once per setting. Then the settings take turns in decoding. Verb options apply
    to all contenders, dense decoding too. Use a quiet machine.

    [bold]Examples[/]

      phasewise bench savers --model path/to/model --tokens 8000
      phasewise bench savers --shape 8x512 --tokens 8192 --batch 1,8 --plot savers.png
      phasewise bench savers neutral --batch 1,8 --new 64
      phasewise bench savers evict=snapkv:keep=0.1 "store=int8 evict=streaming" --csv savers.csv
    """
    engine.check()
    engine.on_the_processor("what savers are worth is measured")
    if engine.schedule is not None:
        raise UserError("savers are compared at equal contexts, prompts first: leave --schedule out")
    if asked.shape is not None and engine.model != DEFAULTS.model:
        raise UserError("--shape stands for a model: leave --model or --shape out")
    from phasewise.bench.bandwidth import StreamedWeight
    from phasewise.bench.drive import Bench
    from phasewise.bench.prompts import begin_of, random_prompts
    from phasewise.bench.savers import Savers, contenders

    load, path = asked.load(), Path(engine.model)
    name = asked.shape or (path.name if path.exists() else engine.model)  # what is written names no place
    chosen = contenders(settings or ())
    written.check(f"{name} {load.tokens}")
    with _model(engine.model, asked.shape, load) as source:
        with working(f"loading {name}"):
            made = Bench.load(source, engine.dtype, weights=engine.weights)
        memory = StreamedWeight()
        run = Savers(made, chosen, load, engine.limits(), engine.verbs)
        with counting("turns", len(load.batches) * load.rounds * (1 + len(chosen))) as tell:
            prompts = random_prompts(made.model.config.vocab, asked.seed, [] if asked.shape else begin_of(engine.model))
            run.run(prompts, memory.rate, tell, lambda: _save(run, name, written))
    _tell(run, name, written)


def _save(run: Savers, name: str, written: SaversFiles) -> list[Worth]:
    """What there is by now, into the file of turns too. -> what it is worth"""
    from phasewise.bench import worth
    from phasewise.bench.machine import describe

    found, load = worth.worths(run.turns, worth.layer_bytes(run.bench.model)), run.load
    if written.csv is not None:
        facts = {"model": name, "tokens": load.tokens, "new": load.new, **describe()}
        worth.write_csv(written.csv, run.turns, found, facts)
    return found


def _tell(run: Savers, name: str, written: SaversFiles) -> None:
    from phasewise.bench import worth
    from phasewise.bench.machine import describe

    found, about, load = _save(run, name, written), describe(), run.load
    dtype = str(run.bench.model.dtype).removeprefix("torch.")
    title = (
        f"{name}, {dtype}, prompts of {load.tokens} tokens, {load.rounds} interleaved rounds of {load.new} tokens: "
        f"medians; gain as the median of paired ratios (range); memory was read at {_rates(run)} GB/s"
        + f"; {run.anew} rounds in which that changed were measured anew"
        * bool(run.anew)
    )
    show.title(title)
    for size in load.batches:
        print(f"{size} at once\n")
        show.table(worth.HEADER, [worth.cells(one) for one in found if one.batch == size])
        print()
    for setting, reason in run.refused.items():
        print(f"not run: {setting}: {reason}")
    for note in _groups(run):
        print(note)
    if written.plot is not None:
        worth.draw(written.plot, found, f"{name}, prompts of {load.tokens} tokens")
    if (path := written.write) is not None:
        head = f"## {name}, {load.tokens} tokens\n\n{title}; {about['cpu']}, {about['threads']} threads."
        notes = [*_groups(run), *(f"Not run: {setting}." for setting in run.refused)]  # reasons may name places
        page = _page(path, f"{name} {load.tokens}", worth.section(found, head, notes))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")


def _rates(run: Savers) -> str:
    """Of all rounds, in GB/s."""
    found = sorted({turn.rate / 1e9 for turn in run.turns})
    return f"{found[0]:.1f}" if found[0] == found[-1] else f"{found[0]:.1f} to {found[-1]:.1f}"


def _groups(run: Savers) -> list[str]:
    """Which batches were not alive at the same time."""
    notes: list[str] = []
    for size, groups in run.groups.items():
        if len(groups) > 1:
            notes.append(
                f"{size} at once: more than the KV budget holds together, so in {len(groups)} groups, dense in each"
            )
    return notes


def _page(path: Path, name: str, section: str) -> str:
    from phasewise.bench.worth import INTRO

    return show.page(path, name, section, INTRO)


@contextmanager
def _model(name: str, shape: str | None, load: BatchLoad) -> Iterator[str]:
    """The model's name, or a directory with random weights of this shape, whose context is just long enough."""
    if shape is None:
        yield name
        return
    from phasewise.reproduce.models import random_llama

    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
    if not found or int(found[2]) % 128:
        raise UserError(f"shape={shape!r}: write LAYERSxHIDDEN, hidden a multiple of 128, such as 8x512")
    with TemporaryDirectory(prefix="phasewise-savers-") as room:
        target = Path(room) / shape
        random_llama(target, layers=int(found[1]), hidden=int(found[2]), context=load.tokens + load.most)
        yield str(target)
