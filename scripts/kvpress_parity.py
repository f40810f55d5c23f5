"""The rows that evict methods keep of a prompt, and the answers after it, beside those of kvpress, both in float32.

    python -m venv there && there/bin/pip install torch==2.13.0 'transformers>=4.56,<5.3' kvpress==0.5.5 gguf
    python scripts/kvpress_parity.py --python there/bin/python [--model smollm2] [--lengths 300,900] [--shares 0.5,0.25]
                                     [--count 4] [--new 32] [--seed 0] [--methods SnapKV,...]
                                     [--write docs/results/kv.md]

kvpress asks for other versions than phasewise is tested with, so it runs in an environment of its own, in a process of
its own (scripts/kvpress_side.py). Prompts are stretches of the language reference. Methods that are not in the
catalogue are left out and named. Exits with 1 where rows differ that should not; notes say what differs by definition.

What the two count differently: kvpress's ratio is the share that goes, of all rows, the window among them, rounded down
to what stays; here the number of rows that stay is given to both. It computes a prompt as if nothing were given up, and
gives nothing up while it answers, so answers can be the same only where a method here does likewise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from phasewise import catalog
from phasewise.bench import machine, report
from phasewise.bench.drive import Bench
from phasewise.bench.rows.longtext import prose
from phasewise.cli import show
from phasewise.cli.progress import counting
from phasewise.errors import UserError, near
from phasewise.llm import LLM
from phasewise.load import model_path
from phasewise.request.params import Params
from phasewise.request.request import Request

WINDOW, SINKS = 32, 4
Rows = list[list[list[int]]]  # by layer and KV head, increasing


@dataclass(frozen=True)
class Case:
    """One method: `ours` is the evict option that keeps so many rows, `press` kvpress's class with its knobs. `sees`:
    whether the next row, at this position, still sees a row, where some lie idle. `strict`: the rows must be the same.
    """

    press: str
    ours: Callable[[int], str]
    knobs: dict[str, Any] = field(default_factory=dict)
    over: str | None = None
    eager: bool = False
    sees: Callable[[int, int, int], bool] = lambda row, at, rows: True
    strict: bool = True
    note: str = ""


SNAP = {"window_size": WINDOW, "kernel_size": 5}
CASES = {
    "SnapKV": Case("SnapKVPress", lambda rows: f"snapkv:keep={rows},window={WINDOW}", SNAP),
    "StreamingLLM": Case(
        "StreamingLLMPress", lambda rows: f"streaming:sinks={SINKS},window={rows - SINKS + 1}", {"n_sink": SINKS},
        sees=lambda row, at, rows: row < SINKS or row > at - (rows - SINKS + 1),
        note="rows that the next one sees, which is one of its own window; here no row of the prompt sees more either, "
        "and sinks are read at their place in the cache, so answers differ by definition",
    ),
    "TOVA": Case(
        "TOVAPress", lambda rows: f"tova:keep={rows},lot=1", strict=False,
        note="kvpress never gives up the last row, and gives up nothing while it answers",
    ),
    "observed attention (H2O)": Case(
        "ObservedAttentionPress", lambda rows: f"h2o:heavy={rows},recent=0,mean=true,lot=1", eager=True,
        note="scores as means, no recent rows held: so kvpress has it; it gives up nothing while it answers",
    ),
    "PyramidKV": Case(
        "PyramidKVPress", lambda rows: f"snapkv:keep={rows},window={WINDOW},layers=pyramid", SNAP, strict=False,
        note="kvpress rounds every layer's budget by itself, keeps as much in all layers where the last would keep "
        "less than the window, and has the first keep no more than the rows before the window",
    ),
    "AdaKV": Case(
        "SnapKVPress", lambda rows: f"snapkv:keep={rows},window={WINDOW},heads=ada", SNAP, over="AdaKVPress",
        strict=False, note="kvpress counts the window among what each head has for certain",
    ),
}  # fmt: skip


@dataclass
class Compared:
    """Of one method, over all prompts."""

    rows: int = 0
    others: int = 0  # of these, rows that kvpress does not keep
    sizes: int = 0  # heads that keep another number of rows
    answers: int = 0
    same: int = 0
    tokens: int = 0
    before: int = 0  # tokens before the first that differs

    def add(self, ours: Rows, theirs: Rows, said: tuple[list[int], list[int]]) -> None:
        for mine, its in zip((h for layer in ours for h in layer), (h for layer in theirs for h in layer), strict=True):
            self.rows += len(mine)
            self.others += len(set(mine) - set(its))
            self.sizes += len(mine) != len(its)
        first = next((i for i, (a, b) in enumerate(zip(*said, strict=True)) if a != b), len(said[0]))
        self.answers += 1
        self.same += first == len(said[0])
        self.tokens += len(said[0])
        self.before += first


def known(case: Case) -> bool:
    """Whether the catalogue has the method with these knobs."""
    name, knobs = catalog.split(case.ours(WINDOW + 1), "evict")
    return name in catalog.names("evict") and set(knobs) <= set(catalog.knobs_of(catalog.method("evict", name)))


def prompts(llm: LLM, lengths: Sequence[int], count: int, seed: int) -> list[list[int]]:
    ids, rng = llm.tokenizer.encode(prose(), add_special=False), Random(f"kvpress {seed}")
    begin = llm.tokenizer.encode("")
    starts = [(length, rng.randrange(len(ids) - length)) for length in lengths for _ in range(count)]
    return [[*begin, *ids[start : start + length - len(begin)]] for length, start in starts]


@torch.inference_mode()
def ours(llm: LLM, case: Case, prompt: list[int], rows: int, new: int) -> tuple[Rows, list[int]]:
    """Rows kept when the prompt is complete, and the answer."""
    engine = Bench(llm.model).engine({"evict": case.ours(rows)}, llm.limits)
    request = Request(prompt, Params(max_tokens=new, ignore_eos=True))
    engine.add(request)
    while not request.n_out and request.left is None:
        engine.step()
    if request.kv is None:
        raise UserError(f"{case.ours(rows)}: a prompt of {len(prompt)} tokens failed: {request.left}")
    kept = [_heads(layer.read(), lambda row: case.sees(row, len(prompt), rows)) for layer in request.kv.layers]
    while request.left is None:
        engine.step()
    return kept, list(request.out)


def _heads(parts: Sequence[Any], sees: Callable[[int], bool]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for part in parts:
        heads = range(part.size[0]) if part.heads is None else part.heads.tolist()
        for head, positions in zip(heads, part.positions.expand(part.size[0], -1).tolist(), strict=True):
            found[head] = sorted(row for row in positions if sees(row))
    return [found[head] for head in sorted(found)]


def theirs(python: Path, model: str, jobs: Sequence[dict[str, Any]]) -> Iterator[tuple[Rows, list[int]]]:
    path = Path(model_path(model))
    asked = {"folder": str(path.parent if path.is_file() else path), "gguf": path.name if path.is_file() else None,
             "jobs": jobs}  # fmt: skip
    side = [str(python), str(Path(__file__).with_name("kvpress_side.py"))]
    try:
        process = subprocess.Popen(side, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise UserError(f"python={python} cannot be run ({error}): name the Python of kvpress's environment") from error
    assert process.stdin and process.stdout
    with process:
        try:
            json.dump(asked, process.stdin)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it says why on stderr
        done = 0
        for line in process.stdout:
            found = json.loads(line)
            done += 1
            yield found["rows"], found["tokens"]
    if process.returncode or done < len(jobs):
        raise UserError(f"kvpress's side ended after {done} of {len(jobs)} prompts: see above")


def compared(asked: argparse.Namespace, cases: dict[str, Case]) -> dict[str, Compared]:
    llm = LLM(asked.model, dtype="float32")
    some = prompts(llm, asked.lengths, asked.count, asked.seed)
    plan = [(name, prompt, int(share * len(prompt))) for name in cases for prompt in some for share in asked.shares]
    jobs = [
        {"press": cases[name].press, "over": cases[name].over, "eager": cases[name].eager, "prompt": prompt,
         "new": asked.new, "knobs": {**cases[name].knobs, "compression_ratio": 1 - (rows + 0.5) / len(prompt)}}
        for name, prompt, rows in plan
    ]  # fmt: skip
    found = {name: Compared() for name in cases}
    with counting("prompts", len(plan)) as tell:
        each = zip(plan, theirs(asked.python, asked.model, jobs), strict=True)
        for done, ((name, prompt, rows), (their_rows, their_tokens)) in enumerate(each, 1):
            own_rows, own_tokens = ours(llm, cases[name], prompt, rows, asked.new)
            found[name].add(own_rows, their_rows, (own_tokens, their_tokens))
            tell(done)
    return found


def table(found: dict[str, Compared], cases: dict[str, Case]) -> str:
    header = ["method", "here", "rows kept", "that kvpress does not keep", "same answers", "tokens before one differs"]
    body = []
    for name, one in found.items():
        odd = f"{one.others} ({one.others / max(1, one.rows):.2%})"
        body.append([name, f"`{cases[name].ours(256)}`", f"{one.rows:,}", odd, f"{one.same} of {one.answers}",
                     f"{one.before} of {one.tokens}"])  # fmt: skip
    return report.markdown(header, body)


def chosen(names: str | None) -> tuple[dict[str, Case], list[str]]:
    """The cases that were asked for and exist, and the names of those that do not. Raises UserError."""
    wanted = list(CASES) if names is None else names.split(",")
    for name in wanted:
        if name not in CASES:
            raise UserError(f"unknown method {name!r}. {near(name, CASES)}")
    return {name: CASES[name] for name in wanted if known(CASES[name])}, [n for n in wanted if not known(CASES[n])]


def numbers(kind: Callable[[str], Any], least: float) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        found = [kind(part) for part in text.split(",")]
        if min(found) <= least:
            raise ValueError
        return found

    return parse


def source(asked: argparse.Namespace) -> str:
    """What measures the same again, and where this was."""
    lengths, shares = (",".join(map(str, some)) for some in (asked.lengths, asked.shares))
    command = (
        f"python scripts/kvpress_parity.py --python PYTHON --model {asked.model} --lengths {lengths} --shares {shares} "
        f"--count {asked.count} --new {asked.new} --seed {asked.seed}"
    )
    about = machine.describe()
    return f"`{command}`, float32, kvpress 0.5.5, {about['cpu']}, Python {about['python']}, torch {about['torch']}."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="of the environment that has kvpress")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", type=numbers(int, 2 * WINDOW), default=[300, 900], help="tokens of prompts")
    parser.add_argument("--shares", type=numbers(float, 0), default=[0.5, 0.25], help="of their rows that stay")
    parser.add_argument("--count", type=int, default=4, help="prompts of each length")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    asked = parser.parse_args(argv)
    cases, missing = chosen(asked.methods)
    found = compared(asked, cases)
    notes = [f"- {name}: {case.note}." for name, case in cases.items() if case.note]
    notes += [f"- Not here: {', '.join(missing)}."] if missing else []
    text = "\n\n".join(part for part in (source(asked), table(found, cases), "\n".join(notes)) if part)
    print(text)
    if asked.write:
        asked.write.write_text(show.page(asked.write, "kvpress", text, "# Rows beside kvpress's\n"), encoding="utf-8")
    return 1 if any(one.others or one.sizes for name, one in found.items() if cases[name].strict) else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
