"""`phasewise eval`: what a model with its methods gets right, as numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import counting
from phasewise.errors import UserError, near

if TYPE_CHECKING:
    from phasewise.bench.quality import Row


@spread
def evaluate(
    tasks: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...", help="Rows to measure; all.")] = None,
    examples: Annotated[int, typer.Option(min=1, help="Examples per row.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the examples.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Append JSON lines to this file.")] = None,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Accuracy on generated tasks and loss on held-out library code, through the engine and its methods.

    Generated tasks are answered greedily through the chat template and checked exactly. With lossy methods the
    numbers say what they cost.

    [bold]Examples[/]

      phasewise eval
      phasewise eval copy recall@1k --evict snapkv:keep=0.25
      phasewise eval code --model path/to/model --examples 20
    """
    engine.check()
    from phasewise.bench import quality
    from phasewise.bench.report import json_lines

    wanted = tasks or list(quality.ALL)
    for name in wanted:
        if name not in quality.ALL:
            raise UserError(f"unknown task {name!r}. {near(name, quality.ALL)}")
    judge = Judge(engine)
    rows: list[quality.Row] = []
    try:
        for at, name in enumerate(wanted):
            with counting(f"{name} ({at + 1} of {len(wanted)})", examples) as tell:
                rows += judge.measure(name, examples, seed, tell)
    finally:  # a row that cannot be measured costs none of those before it
        if rows:
            print(quality.table(rows))
            about = {"model": engine.model, "methods": engine.verbs, "seed": seed}
            json_lines(({**about, **asdict(row)} for row in rows), out)


class Judge:
    """Two engines over one model: one that answers, and one that is made to write given text.

    `answers` and `losses` keep, per task, what every example was answered (tokens) and cost (nats per token).
    """

    def __init__(self, engine: EngineOptions) -> None:
        from phasewise.bench.drive import Bench
        from phasewise.bench.forced import Forced

        self.llm, self.forced = engine.llm(), Forced()
        self.writer = Bench(self.llm.model).engine(engine.verbs, engine.limits(), sample=self.forced)
        self.answers: dict[str, list[list[int]]] = {}
        self.losses: dict[str, list[float]] = {}

    def measure(self, task: str, examples: int, seed: int, tell: Callable[[int], object]) -> list[Row]:
        """The rows of one task; `tell` is told how many examples are done."""
        from phasewise.bench import quality
        from phasewise.bench.forced import forced_loss

        losses = self.losses[task] = []

        def generate(prompts: list[list[int]], room: int) -> list[list[int]]:
            outputs = self.llm.generate(prompts, max_tokens=room, progress=tell)
            broken = next((o for o in outputs if o.left.how != "finished"), None)
            if broken is not None:
                raise UserError(f"{task}: an example failed: {broken.left.reason}")
            self.answers[task] = [output.tokens for output in outputs]
            return self.answers[task]

        def loss(ids: list[int]) -> float:
            losses.append(forced_loss(self.writer, self.forced, ids))
            tell(len(losses))
            return losses[-1]

        def encode(text: str) -> list[int]:
            return self.llm.tokenizer.encode(text, add_special=False)

        begin = self.llm.tokenizer.encode("")
        text = quality.Text(encode, self.llm.tokenizer.decode, lambda messages: self.llm.encode_chat(messages), begin)
        return quality.evaluate(generate, loss, text, tasks=[task], examples=examples, seed=seed)
