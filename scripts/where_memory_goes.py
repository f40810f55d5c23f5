"""Where a server's memory is: what each step from an empty interpreter to an answer adds, as Linux counts it.

    python scripts/where_memory_goes.py [--model smollm2] [--dtype bfloat16] [--tokens 100]

Prints a table in Markdown: memory of the process after each step, and what the step added. `own` is memory that only
this process has, `files` what is mapped: libraries, which other programs share, and models. The most that the process
ever held is the last line.
"""

from __future__ import annotations

import argparse
import gc
import importlib
from pathlib import Path
from typing import Any

SERVER = ("fastapi", "uvicorn", "uvloop", "httptools", "typer", "jinja2", "prometheus_client")
PHASEWISE = ("phasewise.cli.serve", "phasewise.serve.app", "phasewise.llm")


class MemoryTable:
    """Rows of the table, in MB: own memory and files, then what the step added."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float]] = []
        self.step("Python")

    def step(self, name: str) -> None:
        gc.collect()
        self.rows.append((name, status("RssAnon"), status("RssFile")))

    def text(self) -> str:
        lines = ["| after | own, MB | files, MB | together | added |", "|---|---:|---:|---:|---:|"]
        before = 0.0
        for name, own, files in self.rows:
            lines.append(f"| {name} | {own:.0f} | {files:.0f} | {own + files:.0f} | {own + files - before:.0f} |")
            before = own + files
        return "\n".join([*lines, f"| the most at any time | | | {status('VmHWM'):.0f} | |"])


def status(field: str) -> float:
    """A field of /proc/self/status in MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(field + ":"))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--model", default="smollm2")
    asked.add_argument("--dtype")
    asked.add_argument("--tokens", type=int, default=100, help="of the answer")
    args = asked.parse_args()

    table = MemoryTable()
    importlib.import_module("torch")
    table.step("torch")
    for name in SERVER:
        importlib.import_module(name)
    table.step("libraries of the server")
    llm_module: Any = next(reversed([importlib.import_module(name) for name in PHASEWISE]))
    table.step("phasewise")
    from phasewise.bench.machine import cpu
    from phasewise.load import model_path
    from phasewise.model.source import forget
    from phasewise.model.tokenizer import Tokenizer
    from phasewise.ops.native.room import give_back_code

    tokenizer = Tokenizer.load(model_path(args.model))
    table.step("the tokenizer")
    del tokenizer  # the next line loads it again, into the same memory
    llm = llm_module.LLM(args.model, dtype=args.dtype)
    forget()
    table.step(f"the model, {llm.model.weight_bytes / 1e6:.0f} MB of weights")
    give_back_code()
    table.step("what the start alone has run is given back")
    llm.generate("Once upon a time", max_tokens=args.tokens, ignore_eos=True)
    table.step(f"an answer of {args.tokens} tokens")
    print(f"`python scripts/where_memory_goes.py --model {args.model}`, {cpu()}:\n\n{table.text()}")


if __name__ == "__main__":
    main()
