"""`phasewise bench draft`: compares drafters, by task."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli import show
from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import counting, working
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.bound import GuessOdds
    from phasewise.bench.drafting import Drafting
    from phasewise.bench.questions import Asked
    from phasewise.bench.settings import BenchSetting
    from phasewise.llm import LLM

INTRO = "# Drafters\n"
MADE = 8  # questions per task where they are made here


@dataclass(frozen=True)
class Questions:
    """The questions, and how they are asked."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="A file of questions, JSON lines with `category` and `turns`. Default: generated questions.",
        ),
    ] = None
    per_task: Annotated[
        int | None, typer.Option(min=1, help=f"Questions per task. Default: all of a file, {MADE} made ones.")
    ] = None
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Of --prompts only the lines, one in 16, that `phasewise train heads --prompts` does not learn from.",
        ),
    ] = False
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128
    batch: Annotated[str, typer.Option(metavar="B,...", help="Numbers of requests at once.")] = "1,8"
    rounds: Annotated[
        int, typer.Option(min=1, help="How many times everything is asked, interleaved. Medians are reported.")
    ] = 1
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated questions.")] = 0

    def section(self, model: str) -> str:
        """The section of a page, by model, questions and batch: other tables do not replace it."""
        words = [
            "draft",
            model,
            *([] if self.prompts is None else [self.prompts.stem]),
            *(["held out"] if self.held_out else []),
        ]
        return " ".join([*words, *([] if self.batch == QUESTIONS.batch else [f"at {self.batch}"])])

    def asked(self, llm: LLM) -> Asked:
        """The questions as token ids. Raises UserError for a file without questions, or a model that cannot chat."""
        from phasewise.bench.questions import made, questions

        if self.prompts is not None:
            return questions(self.prompts, llm.encode_chat, self.per_task, self.held_out)
        if self.held_out:
            raise UserError("--held-out chooses lines of a file: name one by --prompts FILE.jsonl")
        plain, begin = partial(llm.tokenizer.encode, add_special=False), llm.tokenizer.begin
        return made(llm.encode_chat, plain, begin, self.per_task or MADE, self.seed)


@dataclass(frozen=True)
class DraftingFiles:
    """Where results go besides the terminal."""

    csv: Annotated[Path | None, typer.Option(help="Write every result into this CSV file.")] = None
    plot: Annotated[Path | None, typer.Option(help="Draw figures beside this image's name: one per batch.")] = None
    write: Annotated[
        Path | None, typer.Option(help="Put the tables into a page, such as docs/results/speculation.md.")
    ] = None

    def check(self, section: str) -> None:
        """Raise UserError for what can be seen before anything is measured."""
        if self.plot is not None and find_spec("matplotlib") is None:
            raise UserError("plots are drawn by matplotlib, which is not installed: pip install 'phasewise[bench]'")
        if self.write is not None:
            show.page(self.write, section, "", INTRO)


@dataclass(frozen=True)
class Bounds:
    """Options of the comparison of verifiers with the best possible one."""

    bound: Annotated[
        bool,
        typer.Option(
            "--bound",
            help="Compare verifiers instead of drafters with the best possible one: how often one of "
            "several guesses for a token is accepted, computed from the probabilities of both models.",
        ),
    ] = False
    second: Annotated[str, typer.Option(metavar="MODEL", help="With --bound: the model that guesses.")] = "pocket-draft"
    guesses: Annotated[str, typer.Option(metavar="N,...", help="With --bound: numbers of guesses for a token.")] = (
        "2,3,4"
    )
    temperature: Annotated[float, typer.Option(min=0.01, help="With --bound: temperature of both models.")] = 1.0
    places: Annotated[int, typer.Option(min=1, help="With --bound: tokens examined in each answer.")] = 8

    def check(self, drafters: list[str] | None, asked: Questions, engine: EngineOptions) -> None:
        """Raise UserError for options that would have no effect."""
        if not self.bound:
            given = [name for name in ("second", "guesses", "temperature", "places")
                     if getattr(self, name) != getattr(BOUNDS, name)]  # fmt: skip
            if given:
                raise UserError(f"--{given[0]} is for --bound: add that, or leave --{given[0]} out")
            return
        numbers(self.guesses)
        if drafters:
            raise UserError(f"--bound compares verifiers, not drafters: leave {' '.join(drafters)} out; "
                            "--second MODEL says who guesses")  # fmt: skip
        unused = {"batch": asked.batch != QUESTIONS.batch, "rounds": asked.rounds != QUESTIONS.rounds,
                  "verify": engine.verify is not None, "sample": engine.sample is not None}  # fmt: skip
        if named := [name for name, given in unused.items() if given]:
            raise UserError(f"--bound times nothing and looks at all verifiers: leave --{named[0]} out")


def numbers(text: str) -> list[int]:
    """Numbers of guesses, from 2,3,4. Raises UserError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise UserError(f"guesses={text!r}: write different numbers, separated by commas, such as 2,3,4")
    return found


QUESTIONS, WRITTEN, BOUNDS = Questions(), DraftingFiles(), Bounds()


@spread
def draft(
    drafters: Annotated[
        list[str] | None, typer.Argument(metavar="[DRAFTER]...", help="NAME or NAME:KNOB=VALUE,... Default: all.")
    ] = None,
    asked: Questions = QUESTIONS,
    bounds: Bounds = BOUNDS,
    written: DraftingFiles = WRITTEN,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Compare drafters by task: tokens a pass, work per token, and speed beside plain decoding.

    All contenders answer the same questions greedily, up to the end of each
    answer, in rotating order. Other verb options apply to all of them. Use a
    quiet machine. With --bound nothing is timed: the model writes sampled text,
    and at places of that text the acceptance of each verifier is compared with
    the most that any verifier could reach (Optimal MDSD, arXiv 2502.18779).

    [bold]Examples[/]

      phasewise bench draft
      phasewise bench draft paced prompt_lookup:k=6 --model smollm2 --prompts spec_bench.jsonl --per-task 8
      phasewise bench draft --batch 1,8,32 --rounds 3 --csv drafts.csv --plot drafts.png
      phasewise bench draft --bound --second pocket-draft --guesses 2,4 --csv bound.csv
    """
    engine.check()
    if engine.draft is not None or engine.decode is not None:
        raise UserError(
            "drafters are named as arguments, plain decoding is beside them: leave --draft and --decode out"
        )
    bounds.check(drafters, asked, engine)
    if bounds.bound:
        _bound(asked, bounds, written, engine)
        return
    from phasewise.bench.drafting import Drafting
    from phasewise.bench.drive import Bench
    from phasewise.bench.settings import BenchSetting

    batches, path = show.batches(asked.batch), Path(engine.model)
    name = path.name if path.exists() else engine.model
    contenders = _contenders(drafters)
    section = asked.section(name)
    written.check(section)
    verify, engine = engine.verify, replace(engine, verify=None)
    llm = engine.llm()
    given = asked.asked(llm)
    if verify is not None:
        contenders = [BenchSetting(one.name, {**one.verbs, "verify": verify}) for one in contenders]
    run = Drafting(Bench(llm.model), contenders, engine.limits(), asked.tokens, engine.verbs)
    prompts = sum(map(len, given.values()))
    for batch in batches:
        heats = asked.rounds * (prompts if batch == 1 else len(given)) * (1 + len(contenders))
        with working("warming up"):
            going = run.start(given, batch)
        with counting(f"heats, {batch} at once", heats) as tell:
            for done in run.run(going, given, batch, asked.rounds):
                tell(done)
    llm.close()
    _tell(run, name, section, asked, written)


def _contenders(drafters: list[str] | None) -> list[BenchSetting]:
    """The named drafters, or all. Raises UserError for an unknown drafter or knob."""
    from phasewise import catalog
    from phasewise.bench.drafting import drafters as every
    from phasewise.bench.settings import BenchSetting

    found = [BenchSetting(text, {"draft": text}) for text in dict.fromkeys(drafters)] if drafters else every()
    for one in found:
        catalog.build("draft", one.verbs["draft"])
    return found


def _tell(run: Drafting, name: str, section: str, asked: Questions, written: DraftingFiles) -> None:
    from phasewise.bench import drafted, report
    from phasewise.bench.machine import describe

    about, dtype = describe(), str(run.bench.model.dtype).removeprefix("torch.")
    part = "held-out questions" if asked.held_out else "questions"
    source = "made questions" if asked.prompts is None else f"{part} of {asked.prompts.name}"
    title = f"{name}, {dtype}, {source}, answers of at most {asked.tokens} tokens, {asked.rounds} rounds"
    found = drafted.results(run.heats)
    notes = [f"not run: {setting}: {reason}" for setting, reason in run.refused.items()]
    show.title(title)
    for batch in dict.fromkeys(one.batch for one in found):
        print(f"{batch} at once: times as fast as plain decoding\n")
        show.table(*drafted.speeds(found, batch))
        print()
    print(f"work, {found[0].batch} at once\n")
    show.table(*drafted.work(found, found[0].batch))
    print()
    for line in [*drafted.lengths(run.heats), *notes]:
        print(line)
    if written.csv is not None:
        about_it = {"model": name, "answer": asked.tokens, **about}
        report.write_csv(written.csv, [{**about_it, **asdict(one)} for one in found])
    if written.plot is not None:
        drafted.draw(written.plot, found, title)
    if written.write is not None:
        head = f"### {name}, {asked.batch} at once\n\n{title}; {about['cpu']}, {about['threads']} threads."
        refused = [f"not run: {setting}" for setting in run.refused]  # reasons may name places
        page = show.page(written.write, section, drafted.section(run.heats, found, head, refused), INTRO)
        written.write.parent.mkdir(parents=True, exist_ok=True)
        written.write.write_text(page, encoding="utf-8")


def _bound(asked: Questions, bounds: Bounds, written: DraftingFiles, engine: EngineOptions) -> None:
    from phasewise.bench.bound import Pair, measured, texts
    from phasewise.bench.drive import Bench
    from phasewise.request.params import Params

    section = f"bound {Path(engine.model).name} {Path(bounds.second).name}"
    written.check(section)
    llm, guesses = engine.llm(), numbers(bounds.guesses)
    target, questions = Bench(llm.model), asked.asked(llm)
    pair = Pair.of(target, target.second(bounds.second), engine.limits(), bounds.temperature, engine.verbs)
    with working("writing"):
        params = Params(max_tokens=asked.tokens, temperature=bounds.temperature, seed=asked.seed)
        said = texts(llm.engine, questions, params)
    found: list[GuessOdds] = []
    with counting("texts", len(said)) as tell:
        for number, (task, start, text) in enumerate(said):
            step = -(-(len(text) - start) // bounds.places)
            for position, p, q in pair.nodes(text, start, step):
                found += measured(p, q, guesses, (task, number, position))
            tell(number + 1)
    pair.close()
    llm.close()
    _tell_bound(found, section, bounds, written, engine)


def _tell_bound(
    found: list[GuessOdds], section: str, bounds: Bounds, written: DraftingFiles, engine: EngineOptions
) -> None:
    from phasewise.bench import bounded, report
    from phasewise.bench.machine import describe

    places = len({(one.text, one.position) for one in found})
    title = (f"{Path(engine.model).name}, guesses of {Path(bounds.second).name}, temperature {bounds.temperature:g}, "
             f"{places} places of sampled text")  # fmt: skip
    totals = bounded.totals(found)
    show.title(title)
    show.table(*bounded.table(totals))
    if written.csv is not None:
        about = {"model": Path(engine.model).name, "second": Path(bounds.second).name,
                 "temperature": bounds.temperature, **describe()}  # fmt: skip
        report.write_csv(written.csv, [{**about, **asdict(one)} for one in found])
    if written.plot is not None:
        bounded.draw(written.plot, totals, title)
    if written.write is not None:
        page = show.page(written.write, section, bounded.section(totals, f"### {section}\n\n{title}."), INTRO)
        written.write.parent.mkdir(parents=True, exist_ok=True)
        written.write.write_text(page, encoding="utf-8")
