"""Calibration for attend.tidal (arXiv 2410.05076, section on token re-selection): which layer should pick again.

Needles: the first questions of long tasks ("recall" and "passkey", train/tasks.py), from their training part, so that
none is among the examples that are reported. Dense attention computes a prompt once. Then the rows of the right answer
read it, once for each layer that may pick again; a needle counts by the share of the answer's tokens that are the
likeliest, which tells layers apart by fewer needles than whole answers do. Only needles are counted of whose answer
dense attention finds every token. Nothing is learned, so nothing is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from phasewise.engine.assembly import kv_shapes
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.load import load_model
from phasewise.methods.attend.dense import Dense
from phasewise.methods.attend.tidal import Picker, Tidal
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.mixture import LONG_TASKS, Mixture
from phasewise.train.tasks import turns
from phasewise.verbs.attend import Attend

TOKENS, LENGTH = 24_576, 1024  # of all needles that are counted; of one, about
SHARE = 8  # a part of so many of a prompt's rows is picked
PATIENCE = 4  # so many needles are tried for each that is to be counted

Needle = tuple[list[int], list[int]]
"""A prompt, and its right answer."""


def train(method: Tidal, job: ArtefactJob) -> Path:
    """Count the needles that each layer finds, `job.tokens` tokens of prompts in all.

    Raises UserError for a model that finds fewer than half as many with dense attention, and for one of too few layers.
    """
    model, tokens = load_model(job.model), job.tokens or TOKENS
    method.choosing(model.config.layers)
    wanted = max(1, tokens // LENGTH)
    found, counted = count(model, method, needles(job.mixture(), job.seed), wanted)
    if 2 * counted < wanted:
        raise UserError(
            f"{job.model} finds {counted} needles of {PATIENCE * wanted} with dense attention, and {wanted} were to be "
            "counted: no layer can be chosen by them. Name one: second=LAYER"
        )
    return job.save(model, method.artefact(model.config), {"found": found}, tokens)


def needles(mixture: Mixture, seed: int) -> Iterator[Needle]:
    """Prompts of about 500 to 1,000 tokens, in the model's own form of a chat, and their answers."""
    rng = Random(f"{seed} needles")
    while True:
        task = rng.choices(list(LONG_TASKS), list(LONG_TASKS.values()))[0]
        made = turns(task, rng, rng.randint(LENGTH // 2, LENGTH) - 80, evaluation=False)
        (prompt, _), (answer, _) = mixture.chat(made[:1], None)[:2]
        yield prompt, answer


@torch.inference_mode()
def count(model: Model, method: Tidal, given: Iterator[Needle], wanted: int) -> tuple[Tensor, int]:
    """The share that each layer picking again finds of a needle, summed over those that dense attention finds whole,
    `wanted` of them if as many are met, float32 [layers]; layers that cannot have 0. And how many were counted."""
    layers, found, counted = model.config.layers, torch.zeros(model.config.layers), 0
    for _ in range(PATIENCE * wanted):
        if counted == wanted:
            break
        prompt, answer = next(given)
        k, again = max(1, len(prompt) // SHARE), method.candidates(layers)
        tried = [replace(method, k=k, second=at, every=0, weights="none") for at in again]
        dense, *mine = answers(model, prompt, answer, [Dense(), *(Picker(one, one.choosing(layers)) for one in tried)])
        if dense == 1:
            counted += 1
            for one, right in zip(tried, mine, strict=True):
                found[one.second] += right
    return found, counted


def answers(model: Model, prompt: Sequence[int], answer: Sequence[int], ways: Sequence[Attend]) -> list[float]:
    """The share of the answer's tokens that are the likeliest ones, each behind the right ones before it, with the rows
    behind the prompt read in each of the ways. The prompt is dense."""
    request, counters = Request(prompt, Params(max_tokens=len(answer) + 1)), Counters()
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 40), counters=counters)
    kv = request.kv = store.open(request, len(prompt) + len(answer))
    kv.reserve(len(prompt) - 1)
    whole = Phase("needle", decode=None, attend=Dense())  # type: ignore[arg-type]  # nobody decodes
    forward(model, [Span(request, kv, whole, prompt[:-1], range(len(prompt) - 1))], counters)
    kv.commit(len(prompt) - 1)
    request.computed = len(prompt) - 1
    rows, found = [prompt[-1], *answer[:-1]], list[float]()
    for way in ways:
        phase = Phase("answer", decode=None, attend=way)  # type: ignore[arg-type]
        kv.reserve(len(rows))
        places = range(len(prompt) - 1, len(prompt) - 1 + len(rows))
        x = forward(model, [Span(request, kv, phase, rows, places)], counters).x
        likeliest = model.head(x).argmax(-1).tolist()
        found.append(sum(a == b for a, b in zip(likeliest, answer, strict=True)) / len(answer))
        kv.commit(0)
    request.release()
    return found
