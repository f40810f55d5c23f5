"""How many requests decode at once within a fixed KV budget, without the prefix cache: what bytes saved are for.

    python scripts/requests_that_fit.py [SETTING...] [--model pocket] [--tokens 1000] [--new 8] [--dense 8]
                                        [--write docs/results/kv.md]

The budget holds `--dense` dense requests of that length, their last token included. Five times as many are offered,
with prompts of random tokens, which go first; the most that decode in one step count, and what had to be preempted is
told. A prompt is held whole until it is done, whatever is given up then. Settings: as in `phasewise bench savers`, by
default every saver at work. Nothing here depends on the machine's speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from phasewise.bench import report
from phasewise.bench.drive import Bench
from phasewise.bench.prompts import random_prompts
from phasewise.bench.savers import DENSE, PROMPTS_FIRST, WORK, contenders
from phasewise.bench.settings import BenchSetting
from phasewise.cli.progress import counting
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.request.params import Params
from phasewise.request.request import Request

HEADER = ["setting", "decode at once", "times dense", "preempted"]
OFFERED = 5  # times as many as the budget holds of dense ones


def engine_of(bench: Bench, setting: BenchSetting, budget: int, most: int) -> Engine:
    limits = Limits(kv_bytes=budget, max_running=most, prefix_cache=False)
    found = bench.engine({**PROMPTS_FIRST, **setting.verbs}, limits)
    assert isinstance(found, Engine), "settings of one engine"
    return found


@torch.inference_mode()
def fitting(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> tuple[int, int]:
    """The most requests that decode in one step, and how often one was preempted."""
    requests = [Request(prompt, Params(max_tokens=new, ignore_eos=True)) for prompt in prompts]
    for request in requests:
        engine.add(request)
    most = 0
    while any(request.left is None for request in requests):
        engine.step()
        most = max(most, sum(one.left is None and one.n_out > 0 and one.kv is not None for one in requests))
    bad = next((one.left for one in requests if one.left is not None and one.left.how != "finished"), None)
    if bad is not None:
        raise UserError(f"a request failed: {bad.reason}")
    return most, engine.counters.preemptions


def table(bench: Bench, settings: Sequence[BenchSetting], tokens: int, new: int, dense: int) -> str:
    everybody = [BenchSetting(DENSE), *settings]
    need = engine_of(bench, everybody[0], 1 << 40, 1).recipes[""].need(tokens + new)
    prompt, rows, alone = random_prompts(bench.model.config.vocab, 0), list[list[str]](), 0
    prompts = [prompt(tokens) for _ in range(OFFERED * dense)]
    with counting("settings", len(everybody)) as tell:
        for setting in everybody:
            try:
                most, preempted = fitting(engine_of(bench, setting, dense * need, len(prompts)), prompts, new)
                alone = alone or most
                rows.append([setting.name, str(most), f"{most / alone:.1f}", str(preempted)])
            except UserError as error:
                rows.append([setting.name, "-", "-", str(error).partition(":")[0]])
            tell(len(rows))
    return f"A budget of {report.size(dense * need)}.\n\n" + report.markdown(HEADER, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("settings", nargs="*", default=[])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--new", type=int, default=8, help="tokens that each request decodes")
    parser.add_argument("--dense", type=int, default=8, help="dense requests that the budget holds")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    asked = parser.parse_args(argv)
    found = table(
        Bench.load(asked.model, asked.dtype), contenders(asked.settings or [WORK]), asked.tokens, asked.new, asked.dense
    )
    words = ["python scripts/requests_that_fit.py", *asked.settings, f"--model {asked.model} --tokens {asked.tokens}"]
    head = f"`{' '.join(words)} --new {asked.new} --dense {asked.dense}`, {asked.dtype}."
    print(found)
    if asked.write is not None:
        page = asked.write.read_text(encoding="utf-8")
        asked.write.write_text(report.filled(page, f"fit {asked.model}", f"{head} {found}"), encoding="utf-8")


if __name__ == "__main__":
    main()
