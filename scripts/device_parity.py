"""The KV methods on another device: the same greedy tokens as on the processor, in float32, or which differ.

    python scripts/device_parity.py --device cuda
    python scripts/device_parity.py --device cuda --settings "evict=tova:keep=64;store=kivi"

Each setting answers two prompts at once, on the processor and there. On the processor native kernels take part, on
another device torch's operators alone, so sums are rounded in another order: one token that differs is no proof of a
fault, but a setting that fails is. Printed as Markdown; ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from phasewise import LLM, catalog
from phasewise.errors import UserError

VERBS = ("attend", "evict", "store", "skip")
DECODE = ("augment", "c2c", "kv_prediction")
TIGHT = {"attend": {"quest": "budget=64", "tidal": "k=64", "token_select": "k=64,first=8,local=16",
                    "infllm": "block=16,window=64,topk=4,dense_len=64", "loopserve": "budget=64",
                    "double_sparsity": "k=64"},
         "evict": {"h2o": "heavy=0.125,recent=0.125", "tova": "keep=64", "keyformer": "keep=0.5", "zipvl": "tau=0.9",
                   "streaming": "sinks=4,window=60"}}  # fmt: skip
"""Knobs at which a method has something to do within a few hundred tokens."""
PROMPTS = ("def fibonacci(n):\n    " * 30, "import os, sys\n" * 60 + "print(")
NEW = 24


def every() -> Iterator[str]:
    """Each method of these verbs but the default, at work."""
    for verb in VERBS:
        for name in catalog.names(verb):
            if name not in ("dense", "none", "slab", "all"):
                knobs = TIGHT.get(verb, {}).get(name)
                yield f"{verb}={name}" + (f":{knobs}" if knobs else "")
    yield from (f"decode={name}" for name in DECODE)


def answers(model: str, device: str, setting: str) -> list[list[int]]:
    """Greedy tokens. Raises UserError where the method refuses, RuntimeError where a request fails."""
    verb, _, text = setting.partition("=")
    llm = LLM(model, device=device, dtype="float32", **{verb: text})
    try:
        found = llm.generate(list(PROMPTS), max_tokens=NEW, temperature=0.0, ignore_eos=True)
    finally:
        llm.close()
    for one in found:
        if one.left.how != "finished":
            raise RuntimeError(one.left.reason)
    return [one.tokens for one in found]


def verdict(model: str, device: str, setting: str) -> tuple[str, bool]:
    """What is said of a setting, and whether it may stand."""
    try:
        mine, there = (answers(model, where, setting) for where in ("cpu", device))
    except UserError as error:
        return f"refused: {error}", True
    except RuntimeError as error:
        return f"failed: {error}", False
    same = [sum(a == b for a, b in zip(x, y)) for x, y in zip(mine, there, strict=True)]
    whole = [len(x) for x in mine]
    return ("the same tokens" if same == whole else f"{sum(same)} of {sum(whole)} tokens are the same"), True


def main(words: Sequence[str] | None = None) -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--model", default="pocket")
    asked.add_argument("--settings", help="VERB=METHOD[:KNOBS], separated by semicolons; default: all")
    given = asked.parse_args(words)
    try:
        answers(given.model, given.device, "store=slab")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    good = True
    print(f"| setting | on {given.device} |\n|---|---|")
    for setting in given.settings.split(";") if given.settings else every():
        said, stands = verdict(given.model, given.device, setting.strip())
        good = good and stands
        print(f"| `{setting.strip()}` | {said} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
