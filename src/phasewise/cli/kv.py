"""`phasewise bench kv`: measures the answers of KV methods beside the bytes that they hold and read."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise import catalog
from phasewise.cli import show
from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import counting
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.kv import KVBench, Line
    from phasewise.bench.settings import BenchSetting

GENERATED = "recall@1k,passkey@1k,passkey@2k,code,later@1k"  # for models that learned these tasks
SECTION = re.compile(r"[\w.,@+-]+( [\w.,@+-]+)*")
ANY = "code@2k,docs@2k,passkey-english@2k"


@dataclass(frozen=True)
class Compared:
    """The settings to compare, and the rows to compare them on."""

    settings: Annotated[
        str | None,
        typer.Option(
            metavar="A;B;...",
            help="Settings to compare, separated by semicolons: VERB=METHOD[:KNOB=VALUE,...], several "
            "verbs separated by spaces. A method without knobs stands for all of its budgets. "
            "Default: every lossy method that changes the KV.",
        ),
    ] = None
    budgets: Annotated[
        int | None,
        typer.Option(min=1, help="Most budgets per method and variant. Default: all."),
    ] = None
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="ROW,...",
            help=f"Rows of `phasewise eval`. Default: {GENERATED} for a model that learned such tasks, else {ANY}.",
        ),
    ] = None
    examples: Annotated[int, typer.Option(min=1, help="Number of examples per row.")] = 50
    seed: Annotated[int, typer.Option(min=0, help="Seed of the examples.")] = 0
    prompts: Annotated[Path | None, typer.Option(help="Conversations for the row `agreement`, as JSON lines.")] = None

    def contenders(self) -> list[BenchSetting]:
        """The settings to compare. Raises UserError for a malformed one, or for unknown knobs."""
        from phasewise.bench.kv import chosen, every
        from phasewise.options import parse

        if self.settings is None:
            return every(self.budgets)
        found = chosen([text for text in self.settings.split(";") if text.strip()], self.budgets)
        if not found:
            raise UserError(f"settings={self.settings!r} names no setting: write VERB=METHOD, separated by semicolons")
        for one in found:
            parse(one.verbs)
        return found

    def rows(self) -> list[str]:
        """The rows that were named. Raises UserError for one that does not exist."""
        from phasewise.bench.rows import index

        named = [task.strip() for task in (self.tasks or "").split(",") if task.strip()]
        if self.tasks is not None and not named:
            raise UserError(f"tasks={self.tasks!r} names no row: write rows of `phasewise eval`, separated by commas")
        index.known(named, self.prompts)
        return list(dict.fromkeys(named))


@dataclass(frozen=True)
class KVFiles:
    """Where results go besides the terminal."""

    out: Annotated[
        Path | None, typer.Option(help="Append each measurement to this file of JSON lines as soon as it is done.")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Skip what --out already holds.")] = False
    csv: Annotated[Path | None, typer.Option(help="Write a line per measurement into this CSV file.")] = None
    plot: Annotated[
        Path | None, typer.Option(help="Draw figures beside this image's name: one per row and kind of bytes.")
    ] = None
    write: Annotated[Path | None, typer.Option(help="Put the tables into a page, such as docs/results/kv.md.")] = None
    section: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The section of the page that these tables replace. Default: the model's name."
        ),
    ] = None

    def part(self, model: str) -> str:
        """The name of the page's part."""
        return self.section or model

    def check(self, model: str) -> list[Line]:
        """The lines that --out holds. Raises UserError for mistakes that show before anything is measured."""
        if self.section is not None and self.write is None:
            raise UserError("--section names a part of a page: add --write FILE")
        if self.section is not None and not SECTION.fullmatch(self.section):
            raise UserError(
                f"section={self.section!r}: write words of letters, digits and . , _ @ + -, one space between"
            )
        if self.plot is not None and find_spec("matplotlib") is None:
            raise UserError("plots are drawn by matplotlib, which is not installed: pip install 'phasewise[bench]'")
        if self.write is not None:
            _page(self.write, self.part(model), "")
        if self.resume and self.out is None:
            raise UserError("--resume goes on with a file: add --out FILE")
        if self.out is None or not self.out.exists():
            return []
        if not self.resume:
            raise UserError(f"out={self.out} is there already: add --resume to go on with it, or name another file")
        return _lines(self.out)


def _lines(out: Path) -> list[Line]:
    """The lines of a file that an earlier run has written. Raises UserError where it holds anything else."""
    try:
        lines = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines() if text.strip()]
    except ValueError as error:
        raise UserError(f"out={out} does not hold JSON lines ({error}): name another file") from error
    if not all(isinstance(line, dict) for line in lines):
        raise UserError(f"out={out} holds lines that are no objects: name another file")
    return lines


COMPARED, WRITTEN = Compared(), KVFiles()


@spread
def kv(compared: Compared = COMPARED, written: KVFiles = WRITTEN, engine: EngineOptions = DEFAULTS) -> None:
    """Compare KV methods: right answers and loss, beside the KV bytes that they hold and read.

    Every setting answers the same examples as dense attention, so differences are paired. Live bytes are the KV of a
    request at its last token; read bytes are the KV read for a decoded token. Both are counted in real runs over the
    same prompts. The column "front" marks settings that no other beats in bytes and quality. Verb options apply to all
    contenders, dense attention too. Nothing depends on the machine's speed.

    [bold]Examples[/]

      phasewise bench kv --out kv.jsonl --plot kv.png
      phasewise bench kv --out kv.jsonl --resume --write docs/results/kv.md
      phasewise bench kv --settings "evict=snapkv;store=int8 evict=snapkv:keep=0.25" --tasks passkey@1k
      phasewise bench kv --model smollm2 --tasks code@2k,passkey-english@4k --budgets 1
      phasewise bench kv --model smollm2 --tasks code@8k --write docs/results/kv.md --section "smollm2 8k"
    """
    engine.check()
    path = Path(engine.model)
    name = path.name if path.exists() else engine.model  # what is written names no place
    tasks, settings = compared.rows(), compared.contenders()
    have = written.check(name)
    run = _run(engine, compared, name, settings, tasks)
    from phasewise.bench.report import json_lines

    lines = run.known(have)
    for line in run.run(lines, counting):
        json_lines([line], written.out)
        lines.append(line)
    _tell(run, run.known(lines), written, _command(run, compared, written, engine))


def _run(
    engine: EngineOptions, compared: Compared, name: str, settings: list[BenchSetting], tasks: list[str]
) -> KVBench:
    from phasewise.bench.kv import KVBench
    from phasewise.bench.rows import index

    cluster = "inline" if engine.cluster == DEFAULTS.cluster else engine.cluster  # processes win time: none counts
    none: dict[str, Any] = dict.fromkeys(catalog.VERBS)
    plain = replace(engine, cluster=cluster, **none)
    llm = plain.llm()
    context = llm.model.config.max_positions
    if not tasks:
        tasks = (GENERATED if index.trained_for_tasks(llm.tokenizer) else ANY).split(",")
    for task in tasks:
        index.fits(task, context)
    return KVBench(llm, name, settings, tasks, compared.examples, compared.seed, engine.verbs, compared.prompts)


def _tell(run: KVBench, lines: list[Line], written: KVFiles, command: str) -> None:
    from phasewise.bench import front
    from phasewise.bench.machine import where

    dtype = str(run.llm.model.dtype).removeprefix("torch.")
    base = "".join(f", {verb}={text}" for verb, text in run.base.items())
    what = f"{run.model}, {dtype}{base}: quality with 95 % intervals, paired against dense; KV bytes of a request"
    show.title(what)
    for task, some in front.points(lines).items():
        print(f"{front.title(task, some)}\n")
        show.table(front.HEADER, [front.cells(point) for point in some])
        print()
    for note in front.notes(lines):
        print(note)
    if written.csv is not None:
        front.write_csv(written.csv, lines)
    if written.plot is not None:
        front.draw(written.plot, lines, f"{run.model}, {dtype}{base}")
    if (path := written.write) is not None:
        on = front.machines(lines) or where(run.llm.model.device)  # lines may have come together from several
        part = written.part(run.model)
        head = f"### {part}\n\n{what}.\n`{command}`, {on}."
        page = _page(path, part, front.section(lines, head))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")


def _command(run: KVBench, compared: Compared, written: KVFiles, engine: EngineOptions) -> str:
    """The command that repeats the measurement and writes the same section, without local paths."""
    words = ["phasewise", "bench", "kv", "--model", run.model]
    words += [] if engine.dtype is None else ["--dtype", engine.dtype]
    words += [] if engine.weights is None else ["--weights", engine.weights]
    words += ["--tasks", ",".join(run.tasks)]
    words += [] if run.prompts is None else ["--prompts", run.prompts.name]
    words += ["--examples", str(run.examples), *(["--seed", str(run.seed)] if run.seed else [])]
    words += [] if compared.settings is None else ["--settings", compared.settings]
    words += [] if compared.budgets is None else ["--budgets", str(compared.budgets)]
    words += [word for verb, text in run.base.items() for word in (f"--{verb}", text)]
    if (page := written.write) is not None and written.section is not None:
        words += ["--write", page.name if page.is_absolute() else page.as_posix(), "--section", written.section]
    return shlex.join(words)


def _page(path: Path, part: str, text: str) -> str:
    from phasewise.bench.front import INTRO

    return show.page(path, f"kv {part}", text, INTRO)
