"""What rounding the weights costs in answers: the loss on held-out library source, and the accuracy of tasks.

    python scripts/int8_quality.py [--models pocket,smollm2,gemma3-270m] [--dtypes bfloat16,int8] [--reference bfloat16]
                                   [--windows 24] [--tokens 512] [--seed 0] [--tasks copy,recall@1k] [--examples 100]

Each model reads the same windows of text once per dtype, as prompts of all their tokens. Printed as one Markdown table:
the loss in nats per token; how much it differs from the reference's; the divergence KL(reference || dtype) of the next
token; and the mean |delta log p| of the text's own tokens. Intervals are normal ones of 95 % over windows; differences
are paired. A known model that is not here is left out (`phasewise models` shows which are).

`--dtype int8` leaves a file's own levels as they are. `NAME:expanded` is the same model as a checkpoint in bfloat16,
which has none; it is written to a folder that goes in the end.

`--tasks` adds `phasewise eval` of these rows, on the same examples for each dtype, with Wilson's intervals for shares.
`against bfloat16`: for answers the share of greedy tokens before the first one that differs from the reference's, for a
loss the mean difference. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from phasewise.bench import machine, quality, report
from phasewise.bench.divergence import WindowScores, compared, loss_table, windows
from phasewise.bench.rounds import agreement
from phasewise.cli.evaluate import judge_of
from phasewise.cli.options import EngineOptions
from phasewise.cli.progress import counting
from phasewise.errors import UserError, near
from phasewise.known import shelf
from phasewise.known.models import KNOWN
from phasewise.load import dtype_of, files_of, load_model

EXPANDED = ":expanded"


@dataclass
class Judged:
    """What one dtype got right, answered and lost."""

    rows: list[quality.Row] = field(default_factory=list)
    task: list[str] = field(default_factory=list)  # of each row
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    weight_bytes: int = 0

    @property
    def replies(self) -> list[list[int]]:
        """The answers of all tasks."""
        return [tokens for each in self.answers.values() for tokens in each]


def main(argv: Sequence[str] | None = None) -> None:
    asked = arguments(argv)
    dtypes, tasks = asked.dtypes.split(","), asked.tasks.split(",") if asked.tasks else []
    for name in dtypes:
        dtype_of(name)
    if asked.reference not in dtypes:
        raise UserError(f"the reference {asked.reference} is not measured: add it to --dtypes {asked.dtypes}")
    if asked.windows < 2 or asked.tokens < 2:
        raise UserError(f"--windows {asked.windows} --tokens {asked.tokens}: both must be 2 or more")
    for name in tasks:
        if name not in quality.ALL:
            raise UserError(f"unknown task {name!r}. {near(name, quality.ALL)}")
    models = [name for name in asked.models.split(",") if here(name.removesuffix(EXPANDED))]
    if tasks and any(name.endswith(EXPANDED) for name in models):
        raise UserError(f"--tasks {asked.tasks}: an expanded model has no tokenizer; leave {EXPANDED} models out")
    print(
        f"{machine.cpu()}, {machine.kernels()}; {asked.windows} windows of {asked.tokens} tokens, seed {asked.seed}\n"
    )
    print(report.markdown(*loss_table({model: read(model, dtypes, asked) for model in models}, asked.reference)))
    for model in models if tasks else ():
        found = {name: judged(model, name, tasks, asked) for name in dtypes}
        weights = ", ".join(f"{name} {report.size(found[name].weight_bytes)}" for name in dtypes)
        print(f"\n{model}; weights: {weights}\n")
        print(table(found, asked.reference))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="pocket,smollm2,gemma3-270m", help="names or paths")
    parser.add_argument("--dtypes", default="bfloat16,int8")
    parser.add_argument("--reference", default="bfloat16", help="the dtype that the others are compared with")
    parser.add_argument("--windows", type=int, default=24, help="of text, for the loss")
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--tasks", default="", help="rows of `phasewise eval` to measure as well. Default: none")
    parser.add_argument("--examples", type=int, default=100, help="per task")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def here(name: str) -> bool:
    """Whether a model can be loaded without fetching it; says so where it cannot."""
    if name not in KNOWN or shelf.found(KNOWN[name]):
        return True
    print(f"{name} is left out: it is not here (phasewise models fetch {name})", file=sys.stderr)
    return False


# ---- the loss of text
def read(model: str, dtypes: Sequence[str], asked: argparse.Namespace) -> dict[str, WindowScores]:
    """All windows, by all dtypes; the model is loaded once per dtype."""
    own = model.removesuffix(EXPANDED)
    texts = windows(files_of(own).tokenizer(), asked.windows, asked.tokens, asked.seed)
    with tempfile.TemporaryDirectory(prefix="phasewise-expanded-") as room:
        path = expanded(own, Path(room)) if model.endswith(EXPANDED) else own
        loaded = {name: load_model(path, dtype=dtype_of(name)) for name in dtypes}
    with counting(model, asked.windows) as tell:
        return compared(loaded, asked.reference, texts, tell)


def expanded(model: str, room: Path) -> str:
    """The folder of a checkpoint in bfloat16 that has all weights of a model."""
    files = files_of(model)
    tensors = files.tensors()
    every = {name: tensors.read(name).to(torch.bfloat16).contiguous() for name in tensors.where}
    save_file(every, room / "model.safetensors", metadata={"format": "pt"})
    (room / "config.json").write_text(json.dumps(files.settings().values), encoding="utf-8")
    return str(room)


# ---- the answers to tasks
def judged(model: str, dtype: str, tasks: Sequence[str], asked: argparse.Namespace) -> Judged:
    judge = judge_of(EngineOptions(model=model, dtype=dtype))
    out = Judged(weight_bytes=judge.llm.model.weight_bytes)
    for at, task in enumerate(tasks, 1):
        with counting(f"{model}, {dtype}: {task} ({at} of {len(tasks)})", asked.examples) as tell:
            rows = judge.measure(task, asked.examples, asked.seed, tell)
        out.rows += rows
        out.task += [task] * len(rows)
    out.answers, out.losses = judge.answers, judge.losses
    return out


def table(found: dict[str, Judged], reference: str) -> str:
    """One line per measurement, and one of all answered examples together."""
    others = [name for name in found if name != reference]
    header = ["what", "n", *found, *(f"{name} against {reference}" for name in others)]
    body = []
    base = found[reference]
    for i, (task, row) in enumerate(zip(base.task, base.rows)):
        cells = [f"{row.name} ({row.unit})", str(row.n), *(value(one.rows[i]) for one in found.values())]
        body.append(cells + [against(found[name], base, task, row.unit) for name in others])
    if base.answers:
        n = sum(row.n for row in base.rows if row.unit == "exact")
        same = [agreement(found[name].replies, base.replies) for name in others]
        pooled = [value(together(one)) for one in found.values()]
        body.append(["all answers (exact)", str(n), *pooled, *(f"{share:.1%} same tokens" for share in same)])
    return report.markdown(header, body)


def together(one: Judged) -> quality.Row:
    """All exact answers of all tasks as one share."""
    exact = [row for row in one.rows if row.unit == "exact"]
    return quality.proportion("all", sum(round(row.value * row.n) for row in exact), sum(row.n for row in exact))


def value(row: quality.Row) -> str:
    if row.unit == "exact":
        return f"{row.value:.1%} ({row.low:.1%} to {row.high:.1%})"
    return f"{row.value:.4f} ({row.low:.3f} to {row.high:.3f})"


def against(one: Judged, base: Judged, task: str, unit: str) -> str:
    """Agreement of the answers, or the difference of the losses, where a loss is counted in nats."""
    if unit == "exact":
        return f"{agreement(one.answers[task], base.answers[task]):.1%} same tokens"
    if unit != "nats/token":
        return "-"
    row = quality.mean(task, unit, [ours - theirs for ours, theirs in zip(one.losses[task], base.losses[task])])
    return f"{row.value:+.4f} ({row.low:+.4f} to {row.high:+.4f})"


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
