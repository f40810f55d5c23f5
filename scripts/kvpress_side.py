"""kvpress's side of scripts/kvpress_parity.py, run by the Python of an environment that has kvpress, in float32.

Reads one JSON object from stdin: `folder` and `gguf` (a file in it, or null) of a model, and `jobs`, each with `press`
(a class of kvpress, with `knobs`), `over` (a class around it, or null), `eager`, `prompt` and `new`. Writes one JSON
line per job: the rows that each head of each layer keeps of the prompt, and the greedy tokens after it, each at its
place in the text. Needs torch, transformers and kvpress, and nothing of phasewise.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

Rows = list[list[list[int]]]


def main() -> None:
    asked = json.load(sys.stdin)
    logging.disable_progress_bar()
    more = {"gguf_file": asked["gguf"]} if asked["gguf"] else {}
    model = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.float32, **more).eval()
    for job in asked["jobs"]:
        with torch.inference_mode():
            rows, tokens = pressed(model, job)
        print(json.dumps({"rows": rows, "tokens": tokens}), flush=True)


def pressed(model: Any, job: dict[str, Any]) -> tuple[Rows, list[int]]:
    press = getattr(kvpress, job["press"])(**job["knobs"])
    if job["over"]:
        press = getattr(kvpress, job["over"])(press)
    model.set_attn_implementation("eager" if job["eager"] else "sdpa")
    rows: Rows = []
    compress = press.compress

    def watched(module: Any, hidden: Any, keys: Any, *rest: Any) -> Any:
        found = compress(module, hidden, keys, *rest)
        rows.append(kept(keys[0], found[0][0], module))
        return found

    press.compress = watched
    ids, cache = torch.tensor([job["prompt"]]), DynamicCache()
    with press(model):
        logits = model(ids, past_key_values=cache).logits
    tokens = [int(logits[0, -1].argmax())]
    for at in range(ids.shape[1], ids.shape[1] + job["new"] - 1):  # no row's place in the text changes
        place = torch.tensor([[at]])
        logits = model(torch.tensor([[tokens[-1]]]), past_key_values=cache, position_ids=place).logits
        tokens.append(int(logits[0, -1].argmax()))
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return rows, tokens


def kept(before: torch.Tensor, after: torch.Tensor, module: Any) -> list[list[int]]:
    """Positions of a layer's rows [H, n, D] that are left, per head: of those hidden by number, or found by their
    keys, which are copies."""
    hidden = getattr(module, "masked_key_indices", None)
    if hidden is not None:
        _, heads, slots = hidden
        gone = [set(slots[heads == head].tolist()) for head in range(before.shape[0])]
        return [[at for at in range(before.shape[1]) if at not in out] for out in gone]
    found = []
    for old, new in zip(before, after, strict=True):
        known = {row.numpy().tobytes(): at for at, row in enumerate(old)}
        found.append(sorted(known[row.numpy().tobytes()] for row in new))
    return found


if __name__ == "__main__":
    main()
