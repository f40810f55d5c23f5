"""What forms of weights cost in answers: the loss on held-out source, and rows of `phasewise eval`, form by form.

    python scripts/weights_quality.py [--models pocket,smollm2] [--forms FORM ...] [--windows 24] [--tokens 512]
                                      [--tasks copy,recall@1k|suited|none] [--examples 100] [--seed 0] [--keep FOLDER]

A form is a dtype (bfloat16, int8), or one of weights: int4:group=64, or one for which the model is converted first
(into --keep, or a folder that goes away), int4:group=64,calibrate=gptq or nm:pattern=2:4. It may also be the folder of
a model with the same vocabulary, such as `phasewise train sparsify` leaves. Each model reads the same windows of
text in each form; intervals are normal ones of 95 % over windows, Wilson's for shares, and differences from the first
form are paired. A form that a model's matrices do not fit is named and left out, and so is a model that is not here.
Progress goes to stderr, and each table as soon as it is made to stdout.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from phasewise.bench import machine, report
from phasewise.bench.divergence import compared, loss_table, windows
from phasewise.bench.rows import index
from phasewise.cli.evaluate import judge_of
from phasewise.cli.options import EngineOptions
from phasewise.cli.progress import counting
from phasewise.errors import UserError
from phasewise.load import DTYPES, dtype_of, files_of, load_model
from phasewise.model.model import Model
from phasewise.model.nm import parse_nm
from phasewise.model.weights_form import parse_form
from phasewise.train.few_bits import FewBitsJob, convert
from phasewise.train.prune import PruneJob, prune

FORMS = ["bfloat16", "int8", "int8:group=32", "int4:group=32", "int4:group=32,zeros=true", "int4:group=64",
         "int4:group=64,zeros=true", "int4:group=128", "int4:group=64,calibrate=gptq", "int4:group=64,calibrate=awq",
         "int4:group=64,zeros=true,calibrate=gptq"]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    asked = arguments(argv)
    sibling = beside("int8_quality")
    for form in asked.forms:
        if form not in DTYPES and not Path(form).is_dir() and parse_nm(form, "--forms") is None:
            parse_form(form, "--forms")
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
    parser.add_argument("--keep", help="folder for converted models, which are taken from there if they are")
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
    if asked.tasks != "none":
        judge(model, said, asked, sibling)


def options(model: str, form: str, folder: Path) -> EngineOptions:
    """How a model is loaded in a form; one that is calibrated is converted first."""
    if form in DTYPES:
        return EngineOptions(model=model, dtype=form)
    if Path(form).is_dir():
        return EngineOptions(model=form)
    out = folder / f"{Path(model).name}-{form.replace(':', '-').replace(',', '-').replace('=', '')}"
    if (pattern := parse_nm(form)) is not None:
        if not out.exists():
            prune(PruneJob(model, out, pattern), counting)
        return EngineOptions(model=str(out))
    levels, how = parse_form(form)
    if how.calibrate == "rtn":
        return EngineOptions(model=model, weights=form)
    if not out.exists():
        convert(FewBitsJob(model, out, levels, how), counting)
    return EngineOptions(model=str(out))


def judge(model: str, said: dict[str, EngineOptions], asked: argparse.Namespace, sibling: ModuleType) -> None:
    """Print what `phasewise eval` says of each form."""
    found = {}
    for form, engine in said.items():
        judged = judge_of(engine)
        context = judged.llm.model.config.max_positions
        tasks = (
            index.suited(judged.llm.tokenizer, context, None)[0] if asked.tasks == "suited" else asked.tasks.split(",")
        )
        found[form] = sibling.Judged(weight_bytes=judged.llm.model.weight_bytes)
        for at, task in enumerate(tasks, 1):
            with counting(f"{model}, {form}: {task} ({at} of {len(tasks)})", asked.examples) as tell:
                rows = judged.measure(task, asked.examples, asked.seed, tell)
            found[form].rows += rows
            found[form].task += [task] * len(rows)
        found[form].answers, found[form].losses = judged.answers, judged.losses
    print(
        f"\n{model}; weights: {', '.join(f'{form} {report.size(one.weight_bytes)}' for form, one in found.items())}\n"
    )
    print(sibling.table(found, asked.forms[0]), flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
