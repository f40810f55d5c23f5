"""Profiles symbol tables for store.cachegen (arXiv 2310.07240): how often each channel has each symbol, at each level.

Counted over stretches of library source, in blocks of as many rows as the prefix cache has. Nothing is learned, so
nothing is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.kv.prefix import BLOCK
from phasewise.load import load_model
from phasewise.methods.store._cachegen.rounding import LEVELS, compress
from phasewise.methods.store._cachegen.tables import Counts, counted, grouped
from phasewise.methods.store.cachegen import CacheGen
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.artefacts.attend_double_sparsity import ROW, stretches

TOKENS = 16_384


def train(method: CacheGen, job: ArtefactJob) -> Path:
    """Count the symbols of `job.tokens` of text."""
    model, tokens = load_model(job.model), job.tokens or TOKENS
    tensors = measure(model, stretches(job.model, max(1, tokens // ROW), job.seed), method.group)
    return job.save(model, method.artefact(model.config), tensors, tokens)


@torch.inference_mode()
def measure(model: Model, texts: Sequence[Sequence[int]], group: int) -> dict[str, Tensor]:
    """The tensors of the artefact, over these token rows."""
    totals: dict[int, Counts] = {}
    for tokens in texts:
        for planes in blocks(model, tokens):
            for level in range(1, len(LEVELS) + 1):
                here = counted(symbols(planes, level, group))
                totals[level] = totals[level] + here if level in totals else here
    found = dict[str, Tensor]()
    for level, counts in totals.items():
        found |= {f"{level}.{name}": tensor for name, tensor in grouped(counts).items()}
    return found


def symbols(planes: Sequence[Sequence[Tensor]], level: int, group: int) -> list[np.ndarray]:
    """The symbols [C, T] of keys and values [H, T, D] of all layers, in the order in which blocks are coded."""
    found = []
    for layer, pair in enumerate(planes):
        for plane, steps in zip(pair, LEVELS[level - 1].steps(layer, len(planes))):
            forms = compress(plane.float().permute(1, 0, 2).flatten(1), steps, group)
            found += [form.symbols.T.contiguous().numpy() for form in forms]
    return found


def blocks(model: Model, tokens: Sequence[int]) -> list[list[list[Tensor]]]:
    """Keys and values of the whole blocks of a text, [block][layer][plane] of [H, rows, D]."""
    methods = parse({})
    engine = Builder(model, methods, Limits(kv_bytes=1 << 34, prefix_cache=False), load=load_model).engine(
        ("prefill",), 1.0
    )
    request = Request(tokens, Params(max_tokens=2))
    engine.add(request)
    while request not in engine.departed:
        engine.step()
    assert request.kv is not None
    rows = [piece["planes"] for piece in request.kv.dump()]
    engine.depart(request)
    starts = range(0, len(tokens) - BLOCK + 1, BLOCK)
    return [[[plane[:, at : at + BLOCK] for plane in pair] for pair in rows] for at in starts]
