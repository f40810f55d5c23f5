"""What rounding the weights costs in answers: accuracy of every task and loss on held-out code, per dtype.

    python scripts/int8_quality.py [--examples 100] [--tasks copy,recall@1k,code] [--dtypes float32,bfloat16,int8]
                                   [--reference bfloat16] [--model DIR] [--seed 0]

`phasewise eval` once per dtype, on the same examples, as one Markdown table with 95 % intervals (Wilson's for shares,
normal for means). `against bfloat16`: for answers the share of greedy tokens before the first one that differs from the
reference's, for a loss the mean difference, with the interval of paired differences. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from phasewise.bench import quality, report
from phasewise.bench.rounds import agreement
from phasewise.cli.evaluate import judge_of
from phasewise.cli.options import EngineOptions
from phasewise.cli.progress import counting
from phasewise.errors import UserError, near
from phasewise.load import dtype_of


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
    dtypes, tasks = asked.dtypes.split(","), asked.tasks.split(",")
    for name in dtypes:
        dtype_of(name)
    if asked.reference not in dtypes:
        raise UserError(f"the reference {asked.reference} is not measured: add it to --dtypes {asked.dtypes}")
    for name in tasks:
        if name not in quality.ALL:
            raise UserError(f"unknown task {name!r}. {near(name, quality.ALL)}")
    found = {name: judged(name, tasks, asked) for name in dtypes}
    weights = ", ".join(f"{name} {report.size(found[name].weight_bytes)}" for name in dtypes)
    print(f"{asked.model}, seed {asked.seed}; weights: {weights}; 95 % intervals\n")
    print(table(found, asked.reference))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--examples", type=int, default=100, help="per task")
    parser.add_argument("--tasks", default=",".join(quality.ALL))
    parser.add_argument("--dtypes", default="float32,bfloat16,int8")
    parser.add_argument("--reference", default="bfloat16", help="the dtype whose tokens and losses are compared with")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def judged(dtype: str, tasks: Sequence[str], asked: argparse.Namespace) -> Judged:
    judge = judge_of(EngineOptions(model=asked.model, dtype=dtype))
    out = Judged(weight_bytes=judge.llm.model.weight_bytes)
    for at, task in enumerate(tasks, 1):
        with counting(f"{dtype}: {task} ({at} of {len(tasks)})", asked.examples) as tell:
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
