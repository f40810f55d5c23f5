"""`phasewise eval`: measures the answers and the loss of a model with its methods."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise import catalog
from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import console, counting

if TYPE_CHECKING:
    from phasewise.bench.judge import Judge
    from phasewise.bench.quality import Row


@spread
def evaluate(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK]...", help="Rows to measure. Default: the rows that suit the model."),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Number of examples per row.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the examples.")] = 0,
    prompts: Annotated[
        Path | None, typer.Option(help="Conversations for `agreement`: JSON lines with `turns` or `prompt`.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append JSON lines to this file.")] = None,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Measure right answers and loss of a model with its methods, such as the cost of lossy ones.

    [bold]Rows for any model[/]

      code@2k @4k @8k, docs@2k @4k @8k: loss on library source and prose, in windows of so many tokens
      passkey-english@1k @2k @4k @7.5k: five digits hidden in everyday sentences, of so many tokens
      keys-english@1.8k, near-english@1.8k: of eight people's five digits one's; others differ in one digit (near)
      agreement: greedy tokens equal to the default methods' (needs --prompts), and accepted drafts

    [bold]Rows for models trained on generated tasks, as pocket is[/]

      copy reverse sort arithmetic json edit list second; recall and passkey @256 @1k @2k; "next line", code
      later@256 @1k @2k: the second question about a text, on the KV that the first one left
      keys@1.8k, near@1.8k, hops@1.8k: look-ups with headroom: eight at once, near distractors, two hops

    [bold]Rows for models that were taught to call a calculator, as pocket-tools is[/]

      calculator, calculator-longer -reworded -renamed -among: sums; calculator-idle: other questions, with one

    Answers are greedy, end at the model's end token, and are checked exactly. A row that is longer than the model's
    context is refused, never cut.

    [bold]Examples[/]

      phasewise eval
      phasewise eval copy recall@1k --evict snapkv:keep=0.25
      phasewise eval code@8k passkey-english@4k --model path/to/model --examples 20
      phasewise eval agreement --prompts questions.jsonl --store int8
    """
    engine.check()
    from phasewise.bench import quality
    from phasewise.bench.report import json_lines
    from phasewise.bench.rows import index

    index.known(tasks or [], prompts)
    judge = judge_of(engine)
    wanted = tasks or _suited(judge, prompts)
    rows: list[Row] = []
    try:
        for at, name in enumerate(wanted):
            with counting(f"{name} ({at + 1} of {len(wanted)})", examples) as tell:
                rows += judge.measure(name, examples, seed, tell, prompts)
    finally:  # a row that cannot be measured costs none of those before it
        if rows:
            print(quality.table(rows))
            about = {"model": engine.model, "weights": engine.weights, "methods": engine.verbs, "seed": seed}
            json_lines(({**about, **asdict(row)} for row in rows), out)


def judge_of(engine: EngineOptions) -> Judge:
    """The judge of the model with these methods. Raises UserError naming the option that does not fit."""
    from phasewise.bench.judge import Judge

    engine.check()
    none: dict[str, Any] = dict.fromkeys(catalog.VERBS)
    plain = replace(engine, **none)
    return Judge(plain.llm(), engine.verbs)


def _suited(judge: Judge, prompts: Path | None) -> list[str]:
    from phasewise.bench.rows import index

    context = judge.llm.model.config.max_positions
    wanted, long = index.suited(judge.llm.tokenizer, context, prompts)
    if long:
        console().print(f"left out, as the model's context has only {context:,} tokens: {', '.join(long)}")
    return wanted
