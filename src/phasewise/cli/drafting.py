"""`phasewise bench draft`: which drafter pays on whose text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli import show
from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import counting, working
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.drafting import Drafting
    from phasewise.bench.questions import Asked
    from phasewise.llm import LLM

INTRO = "# Drafters\n"
MADE = 8  # questions per task where they are made here


@dataclass(frozen=True)
class Questions:
    """What is asked, and how."""

    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Questions with `category` and `turns`. Default: made here."),
    ] = None
    per_task: Annotated[
        int | None, typer.Option(min=1, help=f"Questions per task. Default: all of a file, {MADE} made ones.")
    ] = None
    tokens: Annotated[int, typer.Option(min=2, help="Of an answer, at most.")] = 128
    batch: Annotated[str, typer.Option(metavar="B,...", help="Requests at once.")] = "1,8"
    rounds: Annotated[int, typer.Option(min=1, help="Times that everything is asked, interleaved.")] = 1
    seed: Annotated[int, typer.Option(min=0, help="Of questions that are made here.")] = 0

    def asked(self, llm: LLM) -> Asked:
        """Raises UserError for a file that holds no questions, or a model that cannot chat."""
        from phasewise.bench.questions import made, questions

        if self.prompts is not None:
            return questions(self.prompts, llm.encode_chat, self.per_task)
        return made(llm.encode_chat, llm.encode, self.per_task or MADE, self.seed)


@dataclass(frozen=True)
class Written:
    """Where results go besides the terminal."""

    csv: Annotated[Path | None, typer.Option(help="Write every result into this file.")] = None
    plot: Annotated[Path | None, typer.Option(help="Draw the speeds into this image.")] = None
    write: Annotated[Path | None, typer.Option(help="Put the tables into this page, such as docs/speculation.md.")] = (
        None
    )

    def check(self, section: str) -> None:
        """Raise UserError for what can be seen before anything is measured."""
        if self.plot is not None and find_spec("matplotlib") is None:
            raise UserError("plots are drawn by matplotlib, which is not installed: pip install 'phasewise[bench]'")
        if self.write is not None:
            show.page(self.write, section, "", INTRO)


QUESTIONS, WRITTEN = Questions(), Written()


@spread
def draft(
    drafters: Annotated[
        list[str] | None, typer.Argument(metavar="[DRAFTER]...", help="NAME or NAME:KNOB=VALUE,...; default: all.")
    ] = None,
    asked: Questions = QUESTIONS,
    written: Written = WRITTEN,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Which drafter pays: tokens a pass, work per token, and speed beside plain decoding, by task.

    All contenders answer the same questions, greedily, up to the end of each
    answer, in rotating order; other verb options apply to all of them.
    Needs a quiet machine.

    [bold]Examples[/]

      phasewise bench draft
      phasewise bench draft paced prompt_lookup:k=6 --model smollm2 --prompts spec_bench.jsonl --per-task 8
      phasewise bench draft --batch 1,8,32 --rounds 3 --csv drafts.csv --plot drafts.png
    """
    engine.check()
    if engine.draft is not None or engine.decode is not None:
        raise UserError(
            "drafters are named as arguments, plain decoding is beside them: leave --draft and --decode out"
        )
    from phasewise import catalog
    from phasewise.bench.drafting import Drafting
    from phasewise.bench.drafting import drafters as every
    from phasewise.bench.drive import Bench
    from phasewise.bench.settings import Setting

    batches, path = show.batches(asked.batch), Path(engine.model)
    name = path.name if path.exists() else engine.model
    contenders = [Setting(text, {"draft": text}) for text in dict.fromkeys(drafters)] if drafters else every()
    for one in contenders:
        catalog.build("draft", one.verbs["draft"])
    section = f"draft {name}{'' if asked.prompts is None else ' ' + asked.prompts.stem}"
    written.check(section)
    verify, engine = engine.verify, replace(engine, verify=None)
    llm = engine.llm()
    given = asked.asked(llm)
    if verify is not None:
        contenders = [Setting(one.name, {**one.verbs, "verify": verify}) for one in contenders]
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


def _tell(run: Drafting, name: str, section: str, asked: Questions, written: Written) -> None:
    from phasewise.bench import drafted
    from phasewise.bench.machine import describe

    about, dtype = describe(), str(run.bench.model.dtype).removeprefix("torch.")
    source = "made questions" if asked.prompts is None else f"questions of {asked.prompts.name}"
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
        drafted.write_csv(written.csv, found, {"model": name, "answer": asked.tokens, **about})
    if written.plot is not None:
        drafted.draw(written.plot, found, title)
    if written.write is not None:
        head = f"### {name}\n\n{title}; {about['cpu']}, {about['threads']} threads."
        refused = [f"not run: {setting}" for setting in run.refused]  # reasons may name places
        page = show.page(written.write, section, drafted.section(run.heats, found, head, refused), INTRO)
        written.write.parent.mkdir(parents=True, exist_ok=True)
        written.write.write_text(page, encoding="utf-8")
