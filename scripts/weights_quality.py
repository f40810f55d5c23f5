"""What forms of weights cost in answers: the loss on held-out source, and rows of `phasewise eval`, form by form.

    python scripts/weights_quality.py [--models pocket,smollm2] [--forms FORM ...] [--windows 24] [--tokens 512]
                                      [--tasks copy,recall@1k|suited|none] [--examples 100] [--seed 0] [--keep FOLDER]
                                      [--write]

A form is a dtype (bfloat16, int8), or one of weights: int4:group=64, or one for which the model is converted first
(into --keep, or a folder that goes away), such as int4:group=64,calibrate=gptq, codebook:bits=3 or nm:pattern=2:4. It
may also be the folder of a model with the same vocabulary, such as `phasewise train sparsify` leaves.

Each model reads the same windows of text in each form. Intervals are normal ones of 95 % over windows, Wilson's for
shares, and differences from the first form are paired. A form that a model's matrices do not fit is named and left out,
and so is a model that is not here. Progress goes to stderr, and each table as soon as it is made to stdout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TypedDict

from phasewise.bench import machine, quality, report
from phasewise.bench.divergence import WindowScores, averaged, compared, loss_table, windows
from phasewise.bench.rows import index
from phasewise.cli.evaluate import judge_of
from phasewise.cli.options import EngineOptions
from phasewise.cli.progress import counting
from phasewise.errors import UserError
from phasewise.known.forms import FormCost, ModelForms, keep
from phasewise.load import DTYPES, dtype_of, files_of, load_model, weight_forms
from phasewise.model.codebook import parse_codebook
from phasewise.model.lq import parse_lq
from phasewise.model.model import Model
from phasewise.model.nm import parse_nm
from phasewise.model.weights_form import parse_form

FORMS = ["bfloat16", "int8", "int8:group=32", "int4:group=32", "int4:group=32,zeros=true", "int4:group=64",
         "int4:group=64,zeros=true", "int4:group=128", "int4:group=64,calibrate=gptq", "int4:group=64,calibrate=awq",
         "int4:group=64,zeros=true,calibrate=gptq"]  # fmt: skip


class Scored(TypedDict):
    """A row of `phasewise eval`: its unit, and what each example came to."""

    unit: str
    values: list[float]


Kept = dict[str, Scored]
"""The rows of one form, by name."""


def main(argv: Sequence[str] | None = None) -> None:
    asked = arguments(argv)
    sibling = beside("int8_quality")
    for form in asked.forms:
        if form not in DTYPES and not Path(form).is_dir():
            made_once(form)
    models = [name for name in asked.models.split(",") if sibling.here(name)]
    print(f"{machine.cpu()}, {machine.kernels()}; {asked.windows} windows of {asked.tokens} tokens, seed {asked.seed}")
    with tempfile.TemporaryDirectory() as spare:
        for model in models:
            measure(model, asked, Path(asked.keep or spare), sibling)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="pocket,smollm2", help="names or paths")
    parser.add_argument(
        "--forms", nargs="+", default=FORMS, help="dtypes or forms of weights; the first is compared with"
    )
    parser.add_argument("--windows", type=int, default=24, help="of text, for the loss")
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--tasks", default="suited", help="rows of `phasewise eval`: names, suited, or none")
    parser.add_argument("--examples", type=int, default=100, help="per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", help="folder for converted models and judged rows, which are taken from there if they are"
    )
    parser.add_argument("--write", action="store_true", help="what `phasewise models forms` says of these models")
    return parser.parse_args(argv)


def beside(name: str) -> ModuleType:
    """A script of this folder."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def measure(model: str, asked: argparse.Namespace, folder: Path, sibling: ModuleType) -> None:
    """Print both tables of one model, whose forms are all in memory at once."""
    said, loaded = dict[str, EngineOptions](), dict[str, Model]()
    for form in asked.forms:
        try:
            engine = options(model, form, folder)
            loaded[form] = load_model(engine.model, dtype=dtype_of(engine.dtype), weights=engine.weights)
            said[form] = engine
        except UserError as error:
            print(f"\n{model}, {form} is left out: {error}")
    texts = windows(files_of(model).tokenizer(), asked.windows, asked.tokens, asked.seed)
    with counting(model, asked.windows) as tell:
        found = compared(loaded, asked.forms[0], texts, tell)
    print()
    print(report.markdown(*loss_table({model: found}, asked.forms[0])), flush=True)
    loaded.clear()
    rows = None if asked.tasks == "none" else judge(model, said, asked, folder)
    if asked.write:
        about = f"{machine.cpu()}; {asked.windows} windows of {asked.tokens} tokens, {asked.examples} answers a row"
        costs = {form: cost(form, engine, found, rows, asked.forms[0]) for form, engine in said.items()}
        keep(model, ModelForms(asked.forms[0], about, costs))


def cost(
    form: str, engine: EngineOptions, read: dict[str, WindowScores], rows: dict[str, Kept] | None, reference: str
) -> FormCost:
    """What a form costs, by the text that it read and the rows of `phasewise eval` if these were asked."""
    sizes = weight_forms(engine.model, engine.dtype, engine.weights).values()
    bits = 8 * sum(each.nbytes for each in sizes) / sum(each.numbers for each in sizes)
    nats = averaged([ours - theirs for ours, theirs in zip(read[form].nats, read[reference].nats)])
    if rows is None:
        return FormCost(bits, nats, None, ())
    answers = [each for name, row in rows[form].items() if row["unit"] == "exact"
               for each in differences(row, rows[reference][name])]  # fmt: skip
    points = averaged([100 * each for each in answers]) if answers else None
    worse = tuple(name for name, row in rows[form].items() if loses(row, rows[reference][name]))
    return FormCost(bits, nats, points, worse)


def options(model: str, form: str, folder: Path) -> EngineOptions:
    """How a model is loaded in a form; one that is made once is made first."""
    if form in DTYPES:
        return EngineOptions(model=model, dtype=form)
    if Path(form).is_dir():
        return EngineOptions(model=form)
    if not made_once(form):
        return EngineOptions(model=model, weights=form)
    out = folder / file_name(model, form)
    if not out.exists():
        words = ["convert", "weights", model, str(out), "--weights", form, "--windows", "0"]
        if subprocess.run([sys.executable, "-m", "phasewise", *words], stdout=subprocess.DEVNULL).returncode:
            raise UserError(f"it could not be made: phasewise {' '.join(words)}")
    return EngineOptions(model=str(out))


def made_once(form: str) -> bool:
    """Whether only `phasewise convert weights` makes the form. Raises UserError for one that there is not."""
    if any(parse(form, "--forms") is not None for parse in (parse_nm, parse_lq, parse_codebook)):
        return True
    return parse_form(form, "--forms")[1].calibrate != "rtn"


def file_name(model: str, form: str) -> str:
    """What a form of a model is called in the folder of what is kept."""
    return f"{Path(model).name}-{Path(form).name.replace(':', '-').replace(',', '-').replace('=', '')}"


def judge(model: str, said: dict[str, EngineOptions], asked: argparse.Namespace, folder: Path) -> dict[str, Kept]:
    """Print what `phasewise eval` says of each form, and give it. What is kept in `folder` is not judged again."""
    found: dict[str, Kept] = {}
    for form, engine in said.items():
        path = folder / f"{file_name(model, form)}-{asked.tasks}-{asked.examples}-{asked.seed}.json"
        if not path.exists():
            path.write_text(json.dumps(judged(model, form, engine, asked)))
        found[form] = json.loads(path.read_text())
    print(f"\n{verdicts(model, found, asked.forms[0])}\n\n{rows_table(found)}", flush=True)
    return found


def judged(model: str, form: str, engine: EngineOptions, asked: argparse.Namespace) -> Kept:
    """The rows of every task: unit, and what each example came to."""
    judge = judge_of(engine)
    suited = index.suited(judge.llm.tokenizer, judge.llm.model.config.max_positions, None)[0]
    tasks = suited if asked.tasks == "suited" else asked.tasks.split(",")
    kept: Kept = {}
    for at, task in enumerate(tasks, 1):
        with counting(f"{model}, {form}: {task} ({at} of {len(tasks)})", asked.examples) as tell:
            judge.measure(task, asked.examples, asked.seed, tell)
        for scores in judge.found[task]:
            kept[scores.row.name] = {"unit": scores.row.unit, "values": scores.values}
    judge.llm.close()
    return kept


def verdicts(model: str, found: dict[str, Kept], reference: str) -> str:
    """One line per form: right answers and losses beside the reference, paired, and the rows that surely got worse."""
    header = [
        "model",
        "weights",
        "right answers",
        f"points more than {reference}",
        "nats/token more",
        "rows it loses in",
    ]
    body = []
    for form, kept in found.items():
        units = [(row["unit"], differences(row, found[reference][name])) for name, row in kept.items()]
        points, nats = (
            [one for unit, each in units if unit == wanted for one in each] for wanted in ("exact", "nats/token")
        )
        right = [value for row in kept.values() if row["unit"] == "exact" for value in row["values"]]
        worse = [name for name, row in kept.items() if loses(row, found[reference][name])]
        cells = ["-", "-", "-"]
        if form != reference:
            cells = [span(points, 100, 1), span(nats, 1, 4), ", ".join(worse) or "none"]
        body.append([model, form, f"{statistics.fmean(right):.1%} of {len(right)}" if right else "-", *cells])
    return report.markdown(header, body)


def differences(row: Scored, base: Scored) -> list[float]:
    """What each example came to, less what it came to with the reference."""
    return [ours - theirs for ours, theirs in zip(row["values"], base["values"], strict=True)]


def loses(row: Scored, base: Scored) -> bool:
    """Whether a row is worse than the reference's by more than the interval of the paired differences."""
    change = averaged(differences(row, base))
    if row["unit"] in ("exact", "share"):
        return change[2] < 0
    return row["unit"] in ("nats/token", "bits/byte") and change[1] > 0


def span(values: Sequence[float], scale: float, digits: int) -> str:
    """The mean of values with its interval, times `scale`."""
    if not values:
        return "-"
    row = quality.mean("", "", values)
    low, high = (f"{scale * end:+.{digits}f}" for end in (row.low, row.high))
    return f"{scale * row.value:+.{digits}f} ({low} to {high})"


def rows_table(found: dict[str, Kept]) -> str:
    """Every row of `phasewise eval` by form, with 95 % intervals."""
    body = []
    for name, first in next(iter(found.values())).items():
        cells = []
        for kept in found.values():
            values, unit = kept[name]["values"], kept[name]["unit"]
            if unit == "exact":
                row = quality.proportion(name, round(sum(values)), len(values))
                cells.append(f"{row.value:.0%} ({row.low:.0%} to {row.high:.0%})")
            else:
                row = quality.mean(name, unit, values)
                cells.append(f"{row.value:.3f} ({row.low:.3f} to {row.high:.3f})")
        body.append([f"{name} ({first['unit']})", *cells])
    return report.markdown(["row", *found], body)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
