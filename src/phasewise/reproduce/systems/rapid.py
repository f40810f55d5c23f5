"""RAPID: the model drafts from the pieces of a long prompt that matter, and the guesses have a say."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft._pieces import Pieces, Scorer
from phasewise.methods.draft.rapid import Rapid
from phasewise.methods.verify.transfer import TransferVerifier
from phasewise.reproduce import loads
from phasewise.reproduce.headroom import KEYS, SEVERAL
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Paper,
    Quality,
    Saving,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.workload import STRANGER
from phasewise.request.params import Params
from phasewise.request.request import Request

if TYPE_CHECKING:
    from phasewise.model.model import Model

K, CONTEXT, NEW, ETA = 6, 256, 16, 10.0
METHOD = Setting({"draft": f"rapid:k={K},context={CONTEXT}", "verify": f"transfer:eta={ETA:g}"}, most=1)
LENGTHS = (512, 1024, 1920)


@dataclass(frozen=True)
class Anywhere(Rapid):
    """Draws as many pieces at random."""

    def scores(self, reader: Model) -> Scorer:
        return _drawn


def _drawn(pieces: Pieces, query: list[int]) -> NDArray[np.float64]:
    rng = Random(repr((len(pieces), query)))
    return np.array([rng.random() for _ in pieces])


def decoding(run: PlayedRun) -> int:
    """Passes after the prompts'."""
    return sum(step.streams > 0 for step in run.steps)


def passes(case: Case, run: PlayedRun) -> float:
    """Per token after the first."""
    return decoding(run) / (run.work.emitted - len(run.entries))


def beside(lab: Lab, length: int) -> int:
    """The most bytes of KV beside the request's own, for a prompt of this length."""
    request, most = Request(lab.asked("pocket").code(length), Params(max_tokens=NEW, ignore_eos=True)), 0
    with lab.engine(METHOD) as engine, torch.inference_mode():
        engine.add(request)
        while request.left is None:
            engine.step()
            if request.kv is not None:
                most = max(most, engine.kv_bytes - request.kv.bytes)
    return most


def flat(lab: Lab) -> AttemptOutcome:
    found = [beside(lab, length) for length in LENGTHS]
    return AttemptOutcome(found[0] > 0 and len(set(found)) == 1, ", ".join(f"{each:,}" for each in found) + " bytes")


SYSTEM = System(
    title="RAPID",
    paper=Paper("Long-Context Inference with Retrieval-Augmented Speculative Decoding", "2502.20330"),
    claim="a draft that reads retrieved pieces of a long prompt, and moves the target's logits, makes answers better "
    "and sooner: 39.33 to 42.83 on InfiniteBench, more than 2 times the speed beyond 32K tokens (Llama-3.1-8B drafting "
    "for itself).",
    conditions=("Llama-3.1 8B and 70B, Qwen2.5 7B and 72B on GPUs", "prompts of 32K to 128K tokens",
                "chunks of 512 tokens, 8,192 of them kept, chosen by a trained embedding model"),
    method=METHOD,
    baseline=Setting(most=1),
    control=Setting(objects={"decode": Speculative(Anywhere(k=K, context=CONTEXT), TransferVerifier(eta=ETA))}, most=1),
    control_is="as many pieces of the prompt, drawn at random",
    line="a draft over retrieved pieces moves the target's logits: better answers, 2 times as fast beyond 32K",
    promises=("answers", "cost", "time"),
    load=loads.answering("recall@2k", "passkey@2k", n=8),
    missing=("speed beyond 32K tokens: the pocket model's context is 2,048, and reading it a small part of a pass",),
    counters=(
        Counter("passes of the model after the prompts", "tokens - first tokens - accepted guesses",
                lambda case: decoding(case.method),
                lambda case: case.work.emitted - len(case.entries) - case.work.accepted),
        Counter("passes over the pieces", "one per guess", lambda case: case.work.draft_forwards,
                lambda case: case.work.drafted),
    ),
    savings=(Saving("passes over the whole prompt per token", passes, "baseline", 1.2),),
    quality=(
        Quality((SEVERAL,), None, 40, temperature=1.0, gains=True),
        Quality((KEYS,), None, 40, model=STRANGER, gains=True),
    ),
    attempts=(Attempt("counter", f"KV of the drafter for prompts of {', '.join(f'{n:,}' for n in LENGTHS)} tokens",
                      "the same", flat),),
    timings=(Timing("time per token, the model drafting for itself", seconds=loads.pace, price=True),),
    note="Pieces are found by BM25 over tokens. A pass over the pieces costs here about what a pass over all of the "
    "prompt does, for the weights are most of both; so the price that is shown is no gain.",
)  # fmt: skip
