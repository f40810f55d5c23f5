"""Chimera in the engine: its guesses are the plain forward's, and its answers plain decoding's.

Heads have learned what the tiny model writes, by the trainer's own loss, so that guesses are often right.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.draft.chimera import Chimera
from phasewise.request.params import Params
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.layouts import feature_heads, tensors_of
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.test_eagle import watched
from tests.speculation.chimera_files import PlainChimera

CHAIN, TREE = "depth=3,width=1", "depth=4,width=3,nodes=9"


@cache
def heads() -> Path:
    """Heads for `tiny.model()` that know what it writes after `PROMPTS`."""
    out, kind = Path(tempfile.mkdtemp(prefix="phasewise-heads-")), KINDS["chimera"]
    target = FrozenTarget(str(tiny.checkpoint()))
    answers = tiny.plain(PROMPTS, tiny.greedy(N))
    block = pad_rows([[(p, False), (a, True)] for p, a in zip(PROMPTS, answers)], 0)
    module, _ = feature_heads(target.model, ("chimera",), "random:0")
    adam = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(100):
        adam.zero_grad()
        heads_loss(kind, module, target, [block]).total.backward()
        adam.step()
    folder.write(out, kind.config(module, target), tensors_of(module))
    return out


def chimera(knobs: str = TREE, **verbs: str) -> dict[str, str]:
    return {"draft": f"chimera:heads={heads()},{knobs}", **verbs}


def test_a_chain_is_what_the_plain_forward_says_at_every_pass() -> None:
    plain, watch = PlainChimera(heads(), tiny.checkpoint()), watched(chimera(CHAIN), PROMPTS[2:], 12)
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    assert watch.drafts
    for (_, known), draft in watch.drafts.items():
        guesses = list[int]()
        for _ in draft.tokens:
            guesses.append(int(plain.logits(text[:known], guesses)[-1].argmax()))
        assert draft.tokens == guesses


@pytest.mark.parametrize("knobs", [CHAIN, TREE, f"{TREE},table=64"], ids=["chain", "tree", "with a table"])
def test_answers_are_the_models_own_in_fewer_passes(knobs: str) -> None:
    placed = tiny.engine(chimera(knobs))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.accepted > N and placed.counters.forwards < N


def test_a_table_changes_no_guess() -> None:
    counted = []
    for table in (0, 8, 4096):
        placed = tiny.engine(chimera(f"{TREE},table={table}"))
        tiny.run(placed, PROMPTS, tiny.greedy(N))
        counted.append((placed.counters.drafted, placed.counters.accepted, placed.counters.forwards))
    assert counted[0] == counted[1] == counted[2]


def test_sampled_requests_are_plain_decodings_too() -> None:
    params = [Params(N, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(3)]
    placed = tiny.engine(chimera(verify="match"))
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert placed.counters.accepted > 0


def test_random_heads_accept_nothing_and_change_nothing() -> None:
    placed = tiny.engine({"draft": "chimera:heads=random:0,width=1,depth=3"})
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.drafted > N and placed.counters.accepted < placed.counters.drafted / 8


@pytest.mark.parametrize("knob", ["depth", "width", "nodes", "chunk", "table"])
def test_knobs_that_make_no_sense(knob: str) -> None:
    with pytest.raises(UserError, match=f"chimera: {knob}=-1"):
        Chimera(**{knob: -1})
