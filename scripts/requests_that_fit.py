"""How many requests decode at once within a fixed KV budget, without the prefix cache: what bytes saved are for.

    python scripts/requests_that_fit.py [SETTING...] [--model pocket] [--tokens 1000] [--new 8] [--dense 8] [--time]
                                        [--write docs/results/kv.md]

The budget holds `--dense` dense requests of that length, their last token included. Five times as many are offered,
with prompts of random tokens, which go first; the most that decode in one step count, and what had to be preempted is
told. A prompt is held whole until it is done, whatever is given up then. Settings: as in `phasewise bench savers`, by
default every saver at work. Nothing here depends on the machine's speed, but for what `--time` adds: tokens per second
of steps in which the most requests decode, over dense's in its own largest batch (take `--new 24` or more).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from phasewise.bench import report
from phasewise.bench.drive import Bench
from phasewise.bench.fitting import fitting
from phasewise.bench.prompts import random_prompts
from phasewise.bench.savers import DENSE, PROMPTS_FIRST, WORK, contenders
from phasewise.bench.settings import BenchSetting
from phasewise.cli.progress import counting
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError

HEADER = ["setting", "decode at once", "times dense", "preempted"]
TIMED = "tokens/s, times dense"
OFFERED = 5  # times as many as the budget holds of dense ones


def engine_of(bench: Bench, setting: BenchSetting, budget: int, most: int) -> Engine:
    limits = Limits(kv_bytes=budget, max_running=most, prefix_cache=False)
    found = bench.engine({**PROMPTS_FIRST, **setting.verbs}, limits)
    assert isinstance(found, Engine), "settings of one engine"
    return found


def table(
    bench: Bench, settings: Sequence[BenchSetting], tokens: int, new: int, dense: int, timed: bool = False
) -> str:
    everybody = [BenchSetting(DENSE), *settings]
    need = engine_of(bench, everybody[0], 1 << 40, 1).recipes[""].need(tokens + new)
    prompt, rows, alone, speed = random_prompts(bench.model.config.vocab, 0), list[list[str]](), 0, 0.0
    prompts = [prompt(tokens) for _ in range(OFFERED * dense)]
    with counting("settings", len(everybody)) as tell:
        for setting in everybody:
            try:
                found = fitting(engine_of(bench, setting, dense * need, len(prompts)), prompts, new)
                alone, speed = alone or found.most, speed or found.tokens_per_s or 0.0
                rows.append([setting.name, str(found.most), f"{found.most / alone:.1f}", str(found.preemptions)])
                gain = f"{found.tokens_per_s / speed:.2f}" if found.tokens_per_s and speed else "-"
            except UserError as error:
                rows.append([setting.name, "-", "-", str(error).partition(":")[0]])
                gain = "-"
            rows[-1] += [gain] * timed
            tell(len(rows))
    return f"A budget of {report.size(dense * need)}.\n\n" + report.markdown([*HEADER, *[TIMED] * timed], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("settings", nargs="*", default=[])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--new", type=int, default=8, help="tokens that each request decodes")
    parser.add_argument("--dense", type=int, default=8, help="dense requests that the budget holds")
    parser.add_argument("--time", action="store_true", help="tokens per second of the largest batches, beside dense's")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    asked = parser.parse_args(argv)
    found = table(
        Bench.load(asked.model, asked.dtype),
        contenders(asked.settings or [WORK]),
        asked.tokens,
        asked.new,
        asked.dense,
        asked.time,
    )
    words = ["python scripts/requests_that_fit.py", *asked.settings, f"--model {asked.model} --tokens {asked.tokens}"]
    words += ["--time"] * asked.time
    head = f"`{' '.join(words)} --new {asked.new} --dense {asked.dense}`, {asked.dtype}."
    print(found)
    if asked.write is not None:
        page = asked.write.read_text(encoding="utf-8")
        asked.write.write_text(report.filled(page, f"fit {asked.model}", f"{head} {found}"), encoding="utf-8")


if __name__ == "__main__":
    main()
