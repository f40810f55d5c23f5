"""`phasewise bench grammar`: checks JSON Schemas and times their masks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise.cli import show
from phasewise.cli.options import DEFAULTS, EngineOptions, spread
from phasewise.cli.progress import counting, working

if TYPE_CHECKING:
    from phasewise.bench.schemas import SchemaPace


@spread
def grammar(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="JSON lines with name, schema and tests (data, valid).")
    ],
    batch: Annotated[
        int, typer.Option(min=0, help="Requests at once for timing tokens beside free answers; 0: no timing.")
    ] = 8,
    new: Annotated[int, typer.Option(min=2, help="With --batch: tokens of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="With --batch: number of rounds.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Append a JSON line for each schema, and one for the times.")] = None,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Check the schemas of a file (MaskBench's form), and time masks, compiling and tokens.

    A schema is right if the masks accept or reject each of its instances, token
    by token, as the file says. Use a quiet machine for the times.

    [bold]Examples[/]

      phasewise bench grammar maskbench_sample.jsonl --model smollm2 --dtype bfloat16
      phasewise bench grammar schemas.jsonl --batch 0 --out verdicts.jsonl
    """
    engine.check()
    from phasewise.bench.drive import Bench
    from phasewise.bench.latency import percentile
    from phasewise.bench.schemas import judge, pace, read
    from phasewise.methods.sample._words import words_of
    from phasewise.model.tokenizer import Tokenizer

    cases = read(file)
    with working(f"loading {engine.model}"):
        made = Bench.load(engine.model, engine.dtype, engine.device, engine.weights)
    words, tokenizer = words_of(made.model), Tokenizer.load(made.model.files.path)
    verdicts = []
    with counting("schemas", len(cases)) as tell:
        for verdict in judge(cases, tokenizer, words):
            verdicts.append(verdict)
            tell(len(verdicts))
    kinds = Counter[str](verdict.how for verdict in verdicts)
    honoured = [verdict for verdict in verdicts if verdict.how != "refused"]
    compiling, masks = [v.compile for v in honoured], [seconds for v in honoured for seconds in v.masks]
    show.title(f"{engine.model} ({words.vocab:,} tokens), {len(cases)} schemas of {file.name}")
    show.table(
        ["", "right", "wrong", "refused"], [["schemas", *(str(kinds[how]) for how in ("right", "wrong", "refused"))]]
    )
    rows = [["compiling, ms", *_quantiles(compiling, 1e3)], ["a mask, us", *_quantiles(masks, 1e6)]]
    print()
    show.table(["", "p50", "p99", "most", "n"], rows)
    reasons = Counter(verdict.why.partition("(")[0][:90] for verdict in verdicts if verdict.how != "right")
    print("\n" + "\n".join(f"{n:>4}  {why}" for why, n in reasons.most_common()))
    numbers: dict[str, Any] = {
        **kinds,
        "compile_p99_s": percentile(compiling, 0.99),
        "mask_p99_s": percentile(masks, 0.99),
    }
    if batch:
        prompts = [tokenizer.encode(f"Numbers of the year {1900 + i} as JSON: ") for i in range(batch)]
        numbers |= _paced(pace(lambda: made.engine(engine.verbs, engine.limits()), prompts, new, rounds), batch, new)
    show.record(out, "grammar", engine, [*(verdict.row() for verdict in verdicts), numbers])


def _paced(found: SchemaPace, batch: int, new: int) -> dict[str, Any]:
    """Says what tokens and passes of a schema's answer take, and gives it as numbers."""
    tokens = found.tokens
    print(f"\nof a schema's answer, {batch} at once, {new} tokens each, beside a free one's: a token takes "
          f"{found.per_token} times as long, a pass {found.per_pass} times; a pass gives a request "
          f"{tokens['schema']:.2f} tokens, a free one {tokens['free']:.2f}")  # fmt: skip
    return {
        "batch": batch, "tokens_per_pass": tokens, "tpot_s": found.token, "pass_s": found.step,
        "tpot_ratio": found.per_token.median if found.per_token else None,
        "pass_ratio": found.per_pass.median if found.per_pass else None,
    }  # fmt: skip


def _quantiles(seconds: list[float], unit: float) -> list[str]:
    from phasewise.bench.latency import percentile

    found = [percentile(seconds, q) for q in (0.5, 0.99, 1.0)]
    return [*("-" if each is None else f"{each * unit:.3g}" for each in found), f"{len(seconds):,}"]
