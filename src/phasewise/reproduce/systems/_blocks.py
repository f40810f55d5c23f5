"""Closed forms of what stores with packed blocks hold and read, and the error of packed rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.bench.forced import STRETCH, Forced, ForcedTokens, write
from phasewise.bench.prompts import begin_of, text_prompts
from phasewise.kv.format import SIDES, BlockCut, BlockFormat, KVShape
from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Setting
from phasewise.reproduce.workload import code_ids, stretch_to
from phasewise.request.params import Params
from phasewise.request.request import Request

Bits = Sequence[float]  # per number, of packed keys and of packed values


def taken(case: Case, cuts: Sequence[BlockCut], bits: Bits, seen: int, rows: int) -> float:
    """Bytes of `rows` rows in all layers, of which those are packed that are with `seen` of them there."""
    raw = case.row_bytes / 2  # of a side, in bfloat16
    found = 0.0
    for side in SIDES:
        sealed = cuts[side].sealed(seen)
        found += sealed * raw * bits[side] / 16 + (rows - sealed) * raw
    return found


def held(case: Case, cuts: Sequence[BlockCut], bits: Bits, new: int) -> float:
    """Before the last token of a lone request."""
    rows = loads.prompt_rows(case) + new - 2
    return taken(case, cuts, bits, rows, rows)


def read(case: Case, cuts: Sequence[BlockCut], bits: Bits, new: int) -> float:
    """Bytes that the decoded tokens of a lone request read: each reads the rows before it, and its own."""
    prompt = loads.prompt_rows(case)
    return sum(taken(case, cuts, bits, seen, seen + 1) for seen in range(prompt, prompt + new - 1))


def reads(run: PlayedRun) -> int:
    """KV bytes of the decoded tokens."""
    return sum(step.read for step in run.decoding)


@torch.inference_mode()
def rows_of_a_prompt(lab: Lab, length: int = 1024, model: str = "pocket") -> list[tuple[Tensor, Tensor]]:
    """Keys and values of some code on a model, layer by layer, float32 [H, n, D]."""
    with lab.engine(Setting(model=model)) as engine:
        prompt = text_prompts(code_ids(model), lab.scale.seed, begin_of(model))(length)
        request = Request(prompt, Params(max_tokens=2, ignore_eos=True))
        engine.add(request)
        while request.prefilling:
            engine.step()
        assert request.kv is not None
        keys_and_values = [piece["planes"] for piece in request.kv.dump()]
        engine.cancel(request)
    return [(k.float(), v.float()) for k, v in keys_and_values]


@torch.inference_mode()
def errors(rows: Sequence[tuple[Tensor, Tensor]], format: BlockFormat) -> tuple[float, float]:
    """The error of packed keys and values as a share of their norm, a mean over the layers."""
    off: tuple[list[float], list[float]] = [], []
    for layer in rows:
        for side, x in enumerate(layer):
            x = x[:, : x.shape[1] // format.cuts[side].rows * format.cuts[side].rows]
            shape = KVShape(x.shape[0], x.shape[2], x.dtype)
            back = format.open(side, format.seal(side, x), shape)
            off[side].append(float((back - x).norm() / x.norm()))
    return statistics.fmean(off[0]), statistics.fmean(off[1])


def written(lab: Lab, setting: Setting, stretches: int, dtype: str | None = None) -> list[ForcedTokens]:
    """Code that is written by force after half a context of it, at so many places."""
    ids, context = code_ids(), lab.model("pocket").config.max_positions // 2
    count = 2 if lab.scale.quick else stretches
    ends = [context + i * (len(ids) - context) // count for i in range(count)]
    texts, forced = [stretch_to(end, context) for end in ends], Forced()
    with lab.engine(setting, dtype=dtype, sample=forced) as engine:
        return write(engine, forced, [(text, len(text) - 4 * STRETCH) for text in texts])


def nats(lab: Lab, setting: Setting, stretches: int = 8) -> list[float]:
    """Nats of each token of this code."""
    return [one for each in written(lab, setting, stretches) for one in each.nats]


def loss(lab: Lab, setting: Setting, stretches: int = 8) -> float:
    """Nats per token of this code."""
    return statistics.fmean(nats(lab, setting, stretches))


def alike(lab: Lab, setting: Setting, stretches: int, dtype: str | None = None) -> float:
    """The share of tokens of this code in whose place dense decoding would have taken the same one, greedily."""
    mine, dense = (
        [one for each in written(lab, who, stretches, dtype) for one in each.choices] for who in (setting, Setting())
    )
    return statistics.fmean(a == b for a, b in zip(mine, dense, strict=True))
