"""What lossy methods cost, and how often drafts are accepted: each setting beside the default, on the same examples.

    python scripts/evidence.py --out evidence.jsonl [--page docs/results/evidence.md] [--models pocket,smollm2]
                               [--examples 50] [--prompts questions.jsonl] [--tasks code@2k,...] [--settings "A;B;..."]
                               [--quick | --show]

Rows are those of `phasewise eval`. Each one that is done is a line of --out, with the values of its examples; started
again, the script goes on where it was. --page writes the tables from these lines alone. `less the default`: the mean of
paired differences with its 95 % interval (normal; Bonett and Price's for shares of right answers). Without --prompts
there is no agreement. --quick measures two examples of the short rows, which shows that everything runs and nothing
else, so it writes no page. --show measures nothing: the page of what is there. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phasewise.bench import machine, report, stats
from phasewise.bench.judge import Judge
from phasewise.bench.quality import PERCENT
from phasewise.bench.rows import index
from phasewise.bench.rows.agreement import AGREEMENT, WHOLE
from phasewise.bench.settings import DEFAULT, BenchSetting
from phasewise.cli.progress import counting
from phasewise.errors import UserError
from phasewise.llm import LLM

SETTINGS = (
    "store=int8",
    "store=kivi",
    "evict=snapkv:keep=0.5",
    "evict=snapkv:keep=0.25",
    "evict=streaming",
    "evict=streaming:sinks=4,window=508",
    "attend=quest",
    "attend=quest:page=4",
    "attend=quest:budget=512",
    "skip=unified",
    "skip=unified:weights=none",
    "draft=prompt_lookup",
    "draft=draft_model",
)
ALSO = ("code@2k", "docs@2k")  # measured of models that have rows of their own, too
FEWER = {"code@8k": 12, "docs@8k": 12, "passkey-english@7.5k": 24}  # examples at most: they take longest
QUICK = 2048  # tokens of the longest row of a quick run
Line = dict[str, Any]
Key = tuple[str, str, str]


def main(argv: Sequence[str] | None = None) -> None:
    asked = arguments(argv)
    if asked.quick and asked.page:
        raise UserError("--quick shows only that everything runs: leave --page out")
    named = asked.tasks.split(",") if asked.tasks else []
    index.known(named, asked.prompts)
    settings = {DEFAULT: BenchSetting(DEFAULT)} | {text: BenchSetting.parse(text) for text in asked.settings.split(";")}
    lines = read(asked.out)
    about = {"commit": commit(), "machine": machine.describe(), "command": command(argv)}
    for model in () if asked.show else asked.models.split(","):
        for line in measured(model, settings, asked, done(lines, asked)):
            report.json_lines([line | about], asked.out)
            lines.append(line | about)
    text = page([line for line in lines if belongs(line, asked)], asked.models.split(","))
    print(text)
    if asked.page:
        asked.page.write_text(text + "\n")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines: what is done, and where to go on")
    parser.add_argument("--page", type=Path, help="write the tables to this Markdown file")
    parser.add_argument("--models", default="pocket,smollm2")
    parser.add_argument("--settings", default=";".join(SETTINGS), help="separated by semicolons")
    parser.add_argument("--tasks", help="rows of `phasewise eval`; without, those that suit each model")
    parser.add_argument("--prompts", type=Path, help="conversations for agreement, as JSON lines")
    parser.add_argument("--examples", type=int, default=50, help=f"per row; at most {FEWER}")
    parser.add_argument("--seed", type=int, default=0)
    less = parser.add_mutually_exclusive_group()
    less.add_argument("--quick", action="store_true", help="two examples of the short rows")
    less.add_argument("--show", action="store_true", help="measure nothing: the page of what is there")
    asked = parser.parse_args(argv)
    if asked.quick:
        asked.examples = 2
    return asked


def measured(
    model: str, settings: dict[str, BenchSetting], asked: argparse.Namespace, have: set[Key]
) -> Iterator[Line]:
    """A line for every row that is not there yet; one that is refused says why."""
    llm = LLM(model)
    tasks = suited(llm, asked)
    for name, setting in settings.items():
        missing = [task for task in tasks if (model, name, task) not in have]
        if not missing:
            continue
        try:
            judge = Judge(llm, setting.verbs)
        except UserError as error:
            for task in missing:
                yield line_of(model, name, task, asked) | {"refused": str(error)}
            continue
        for at, task in enumerate(missing, 1):
            yield one(
                judge, line_of(model, name, task, asked), f"{model}, {name}: {task} ({at} of {len(missing)})", asked
            )


def one(judge: Judge, line: Line, title: str, asked: argparse.Namespace) -> Line:
    start = time.monotonic()
    try:
        with counting(title, line["examples"]) as tell:
            judge.measure(line["task"], line["examples"], asked.seed, tell, asked.prompts)
    except UserError as error:
        return line | {"refused": str(error)}
    rows = [asdict(found.row) | {"values": found.values} for found in judge.found[line["task"]]]
    return line | {"rows": rows, "seconds": time.monotonic() - start}


def suited(llm: LLM, asked: argparse.Namespace) -> list[str]:
    """The rows of one model: those that were asked for, or those that suit it."""
    if asked.tasks:
        return list(asked.tasks.split(","))
    context = llm.model.config.max_positions
    tasks, _ = index.suited(llm.tokenizer, context, asked.prompts)
    tasks += [task for task in ALSO if task not in tasks and index.tokens(task) <= context]
    return [task for task in tasks if index.tokens(task) <= QUICK] if asked.quick else tasks


def examples(task: str, asked: argparse.Namespace) -> int:
    return int(min(asked.examples, FEWER.get(task, asked.examples)))


def line_of(model: str, setting: str, task: str, asked: argparse.Namespace) -> Line:
    prompts = asked.prompts.name if task == AGREEMENT else None
    return {"model": model, "setting": setting, "task": task, "examples": examples(task, asked), "seed": asked.seed,
            "prompts": prompts}  # fmt: skip


def belongs(line: Line, asked: argparse.Namespace) -> bool:
    """Whether a line is of a run like this one: the same examples."""
    if line["task"] == AGREEMENT and asked.prompts is None:
        return False
    wanted = line_of(line["model"], line["setting"], line["task"], asked)
    return all(line[key] == value for key, value in wanted.items())


def done(lines: Sequence[Line], asked: argparse.Namespace) -> set[Key]:
    return {(line["model"], line["setting"], line["task"]) for line in lines if belongs(line, asked)}


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def command(argv: Sequence[str] | None) -> str:
    return shlex.join(["python", "scripts/evidence.py", *(sys.argv[1:] if argv is None else argv)])


def commit() -> str:
    """The commit of the working tree, and whether tracked files differ from it."""

    def git(*words: str) -> str:
        asked = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()

    changed = " and changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed


def page(lines: Sequence[Line], models: Sequence[str]) -> str:
    """All tables, one per model; below each what was refused, and where it was measured."""
    parts = ["# What methods cost in answers", "",
             "Made by `scripts/evidence.py`: every setting beside the default, on the same examples. Intervals are "
             "95 %; `less the default` is the mean of paired differences."]  # fmt: skip
    for model in models:
        own = [line for line in lines if line["model"] == model]
        if own:
            parts += ["", f"## {model}", "", table(own), *refusals(own), "", *sources(own)]
    return "\n".join(parts)


def table(lines: Sequence[Line]) -> str:
    base = {(line["task"], *identity(row)): row for line in lines if line["setting"] == DEFAULT
            for row in line.get("rows", [])}  # fmt: skip
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    body = []
    for task in tasks:
        rows = [(line["setting"], row) for line in lines if line["task"] == task for row in line.get("rows", [])]
        rows = [(setting, row) for setting, row in rows if row["name"] != WHOLE]  # the default's own beginning says it
        for kind in dict.fromkeys(identity(row) for _, row in rows):
            for setting, row in rows:
                if identity(row) == kind:
                    less = difference(row, base.get((task, *kind))) if setting != DEFAULT else "-"
                    body.append([f"{kind[0]} ({kind[1]})", f"`{setting}`", shown(row), less, str(row["n"])])
    return report.markdown(["row", "setting", "value", "less the default", "n"], body)


def identity(row: Line) -> tuple[str, str]:
    return row["name"], row["unit"]


def shown(row: Line) -> str:
    if row["unit"] in PERCENT:
        return f"{row['value']:.1%} ({row['low']:.1%} to {row['high']:.1%})"
    return f"{row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def difference(row: Line, base: Line | None) -> str:
    """Of paired examples, where there are any."""
    if base is None or not row["values"] or len(row["values"]) != len(base["values"]):
        return "-"
    found = (stats.shares if row["unit"] == "exact" else stats.means)(row["values"], base["values"])
    if row["unit"] in PERCENT:
        return f"{found.mean * 100:+.1f} points ({found.low * 100:+.1f} to {found.high * 100:+.1f})"
    return f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def refusals(lines: Sequence[Line]) -> list[str]:
    """What was not measured, once per setting and reason."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if "refused" in line:
            tasks.setdefault((line["setting"], line["refused"]), []).append(line["task"])
    said = [f"- `{setting}`, {', '.join(names)}: {reason}" for (setting, reason), names in tasks.items()]
    return ["", "Refused:", "", *said] if said else []


def sources(lines: Sequence[Line]) -> list[str]:
    """Command, commit and machine of the lines, each once."""
    found = dict.fromkeys(
        f"- `{line['command']}`, commit {line['commit']}, {line['machine']['cpu']}, {line['machine']['cores']} cores, "
        f"Python {line['machine']['python']}, torch {line['machine']['torch']}" for line in lines
    )  # fmt: skip
    return ["Measured by:", "", *found]


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
