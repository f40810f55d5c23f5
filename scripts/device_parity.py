"""Methods on another device: the same tokens as on the processor, or which differ.

    python scripts/device_parity.py --device cuda
    python scripts/device_parity.py --device cuda --dtype bfloat16
    python scripts/device_parity.py --device cuda --settings "evict=tova:keep=64;draft=rsd verify=match temperature=0.8"

Each setting answers two prompts at once, on the processor and there: KV methods, decode methods, drafters with each
exact verifier, and samplers, greedily and, where draws are part of it, at temperature 0.8. On the processor native
kernels take part, on another device torch's operators alone, so sums are rounded in another order: one token that
differs is no proof of a fault, but a setting that fails is. So is a drafter under `match` that changes a token of the
same device's plain decoding in float32. With `--dtype bfloat16` near ties fall otherwise sooner. Printed as Markdown;
ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from phasewise import LLM, catalog
from phasewise.errors import UserError

VERBS = ("attend", "evict", "store", "skip")
DECODE = ("augment", "c2c", "kv_prediction")
DRAFT = {"retrieval": "store=random:0", "aded": "store=random:0", "rasd": "source=(retrieval:store=random:0)",
         "pearl": "where=inline", "paced": "of=(draft_model:k=3)", "medusa": "heads=random:0",
         "hydra": "heads=random:0"}  # fmt: skip
VERIFY = ("match", "rejection", "k_seq")
SAMPLE = ("standard", "standard:coupling=gumbel", "momentum", "grammar")
HOT = "temperature=0.8"
TIGHT = {"attend": {"quest": "budget=64", "tidal": "k=64", "token_select": "k=64,first=8,local=16",
                    "infllm": "block=16,window=64,topk=4,dense_len=64", "loopserve": "budget=64",
                    "double_sparsity": "k=64"},
         "evict": {"h2o": "heavy=0.125,recent=0.125", "tova": "keep=64", "keyformer": "keep=0.5", "zipvl": "tau=0.9",
                   "streaming": "sinks=4,window=60"}}  # fmt: skip
"""Knobs at which a method has something to do within a few hundred tokens."""
PROMPTS = ("def fibonacci(n):\n    " * 30, "import os, sys\n" * 60 + "print(")
NEW = 24


def every() -> Iterator[str]:
    """Each method of these verbs but the default, at work; drafters by verifiers in turn, and samplers."""
    for verb in VERBS:
        for name in catalog.names(verb):
            if name not in ("dense", "none", "slab", "all"):
                knobs = TIGHT.get(verb, {}).get(name)
                yield f"{verb}={name}" + (f":{knobs}" if knobs else "")
    yield from (f"decode={name}" for name in DECODE)
    for i, name in enumerate(catalog.names("draft")):
        draft = f"draft={name}" + (f":{DRAFT[name]}" if name in DRAFT else "")
        yield f"{draft} verify=match"
        yield f"{draft} verify={VERIFY[i % len(VERIFY)]} {HOT}"
    for name in SAMPLE:
        yield from (f"sample={name}", f"sample={name} {HOT}")


def read(setting: str) -> tuple[dict[str, str], float]:
    """The verbs of a setting, and its temperature."""
    verbs = dict(word.split("=", 1) for word in setting.split(" "))
    return verbs, float(verbs.pop("temperature", 0))


def answers(model: str, device: str, dtype: str, setting: str) -> list[list[int]]:
    """What the two prompts are answered. Raises UserError where the method refuses, RuntimeError where a request
    fails."""
    verbs, temperature = read(setting)
    llm = LLM(model, device=device, dtype=dtype, **verbs)
    try:
        found = llm.generate(list(PROMPTS), max_tokens=NEW, temperature=temperature, ignore_eos=True)
    finally:
        llm.close()
    for one in found:
        if one.left.how != "finished":
            raise RuntimeError(one.left.reason)
    return [one.tokens for one in found]


def verdict(model: str, device: str, dtype: str, setting: str) -> tuple[str, bool]:
    """What is said of a setting, and whether it may stand."""
    verbs, temperature = read(setting)
    try:
        mine, there = (answers(model, where, dtype, setting) for where in ("cpu", device))
        if verbs.get("verify") == "match" and dtype == "float32":
            plain = answers(model, device, dtype, f"store=slab temperature={temperature}")
            if plain != there:
                return "other tokens than without drafts there", False
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
    asked.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    asked.add_argument("--settings", help="VERB=METHOD[:KNOBS] ..., separated by semicolons; default: all")
    given = asked.parse_args(words)
    try:
        answers(given.model, given.device, given.dtype, "store=slab")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    good = True
    print(f"| setting | on {given.device}, {given.dtype} |\n|---|---|")
    for setting in given.settings.split(";") if given.settings else every():
        said, stands = verdict(given.model, given.device, given.dtype, setting.strip())
        good = good and stands
        print(f"| `{setting.strip()}` | {said} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
