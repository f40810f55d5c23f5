"""What each level of `store cachegen` costs and saves: bytes per token, errors of keys and values, recall accuracy.

    python scripts/cachegen_levels.py [--examples 100] [--levels 0,1,2,3,4] [--knobs group=10,chunk=1000] [--model DIR]

Bytes and errors are those of the prompts that are answered; answers come from a placement whose prompts' KV travels
between two engines. Prints a Markdown table, a level at a time; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from phasewise.bench import quality
from phasewise.builder import Builder
from phasewise.cli.progress import counting
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv.cache import KV
from phasewise.kv.wire import Dump, RowsOrigin
from phasewise.llm import LLM
from phasewise.load import load_model
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.train.tasks import example

TASKS = ("recall@256", "recall@1k")
HEADS = ("level", "bytes/token", "of bf16", "max error k", "v", "rms error k", "v", *TASKS)


@dataclass
class Errors:
    """Of keys or of values, over all rows seen."""

    most: float = 0.0
    squares: float = 0.0
    energy: float = 0.0

    def add(self, true: torch.Tensor, arrived: torch.Tensor) -> None:
        off = true.float() - arrived.float()
        self.most = max(self.most, float(off.abs().max()))
        self.squares += float(off.square().sum())
        self.energy += float(true.float().square().sum())

    @property
    def relative(self) -> float:
        """Root mean square of the error against that of the numbers."""
        return (self.squares / self.energy) ** 0.5 if self.energy else 0.0


@dataclass
class Travelled:
    """What the prompts' KV took and lost on its way."""

    tokens: int
    n_bytes: int
    raw: int  # bytes as bfloat16
    keys: Errors
    values: Errors


def main() -> None:
    asked = arguments()
    print(f"{asked.model}, {asked.examples} examples per task, seed {asked.seed}, {asked.knobs or 'default knobs'}\n")
    print("| " + " | ".join(HEADS) + " |\n|" + "---:|" * len(HEADS), flush=True)
    for level in asked.levels.split(","):
        store = f"cachegen:level={level}" + (f",{asked.knobs}" if asked.knobs else "")
        llm = LLM(asked.model, place="disaggregated", store=store)
        print(line(level, travelled(llm, store, asked), accuracies(llm, store, asked)), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--examples", type=int, default=100, help="per task")
    parser.add_argument("--levels", default="0,1,2,3,4")
    parser.add_argument("--knobs", default="", help="further knobs of the method, as in group=10,chunk=1000")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def prompts(llm: LLM, asked: argparse.Namespace) -> Iterator[list[int]]:
    """The very prompts that `quality.evaluate` will ask."""
    for name in TASKS:
        rng = random.Random(f"{asked.seed} {name}")
        task, length = quality.TASKS[name]
        for _ in range(asked.examples):
            yield llm.encode_chat(example(task, rng, length).messages)


def travelled(llm: LLM, store: str, asked: argparse.Namespace) -> Travelled:
    """Compute every prompt, send its KV, and look at what arrives."""
    engine = Builder(llm.model, parse({"store": store}), Limits(), load=load_model).engine(("prefill",), 1.0)
    found = Travelled(0, 0, 0, Errors(), Errors())
    with counting(f"{store}: bytes and errors", asked.examples * len(TASKS)) as tell:
        for done, prompt in enumerate(prompts(llm, asked), 1):
            look(engine, prompt, found)
            tell(done)
    return found


@torch.inference_mode()
def look(engine: Engine, prompt: list[int], found: Travelled) -> None:
    request = Request(prompt, Params(max_tokens=2, ignore_eos=True))
    engine.add(request)
    while request not in engine.departed:
        engine.step()
    assert request.kv is not None
    rows = request.kv.dump()
    arrived, n_bytes = sent(request.kv, rows)
    for before, after in zip(rows, arrived):
        found.keys.add(before["planes"][0], after["planes"][0])
        found.values.add(before["planes"][1], after["planes"][1])
    found.tokens += len(prompt)
    found.n_bytes += n_bytes
    found.raw += 2 * sum(plane.numel() for piece in rows for plane in piece["planes"])
    engine.depart(request)
    engine.forget_prefixes()


def sent(kv: KV, rows: Dump) -> tuple[Dump, int]:
    """What arrives, and the bytes that it took."""
    if kv.wire is None:
        return rows, sum(plane.nbytes for piece in rows for plane in piece["planes"])
    encoded = kv.wire.encode(rows, RowsOrigin())
    return kv.wire.decode(encoded.content), sum(chunk.nbytes for chunk in encoded.content["chunks"])


def accuracies(llm: LLM, store: str, asked: argparse.Namespace) -> list[quality.Row]:
    def generate(asks: list[list[int]], room: int) -> list[list[int]]:
        with counting(f"{store}: answers", len(asks)) as tell:
            outputs = llm.generate(asks, Params(max_tokens=room), progress=tell)
        broken = next((o for o in outputs if o.left.how != "finished"), None)
        if broken is not None:
            raise UserError(f"an example failed: {broken.left.reason}")
        return [output.tokens for output in outputs]

    def no_loss(ids: list[int]) -> float:
        raise AssertionError("these tasks are answered")

    def encode(text: str) -> list[int]:
        return llm.tokenizer.encode(text, add_special=False)

    begin = llm.tokenizer.begin
    text = quality.TextCodec(encode, llm.tokenizer.decode, lambda messages: llm.encode_chat(messages), begin)
    return quality.evaluate(generate, no_loss, text, tasks=TASKS, examples=asked.examples, seed=asked.seed)


def line(level: str, seen: Travelled, scores: list[quality.Row]) -> str:
    cells = [
        level, f"{seen.n_bytes / seen.tokens:,.0f}", f"1/{seen.raw / seen.n_bytes:.2f}",
        f"{seen.keys.most:.3f}", f"{seen.values.most:.3f}", f"{seen.keys.relative:.2%}",
        f"{seen.values.relative:.2%}", *(f"{s.value:.1%} ({s.low:.0%} to {s.high:.0%})" for s in scores),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
