"""`draft.dflash`, and `draft.eagle` with P-EAGLE's heads: what is guessed is what their plain forward says, and what is
answered is the model's own."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasewise.errors import UserError
from phasewise.methods.draft.dflash import DFlash
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.heads.layouts import feature_heads
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.test_eagle import Watch, serve
from tests.laws.scenario import preempt
from tests.speculation import one_pass_files as files

GUESSES = 3


@cache
def heads(kind: str) -> Path:
    """Heads that know what the tiny model writes after `PROMPTS`: random layers, and an output head solved for."""
    folder = Path(tempfile.mkdtemp(prefix="phasewise-heads-"))
    if kind == "dflash":
        files.dflash(folder, 48, names="speculators", aux=(1, 2, 4), draft=tiny.VOCAB)
    else:
        files.peagle(folder, 48)
    plain, rows, said = files.PlainPass(folder, tiny.checkpoint()), [], []
    run = plain.masked_block if kind == "dflash" else plain.masked_tail
    for prompt, answer in zip(PROMPTS, tiny.plain(PROMPTS, tiny.greedy(N))):
        text = [*prompt, *answer]
        for end in range(len(prompt) + 1, len(text) - GUESSES):
            rows.append(run(text[:end], GUESSES))
            said += text[end : end + GUESSES]
    x = files.normed(torch.cat(rows), plain.w["norm.weight"])
    wanted = torch.nn.functional.one_hot(torch.tensor(said), tiny.VOCAB).float() * 12
    solved = torch.linalg.solve(x.T @ x + 0.05 * torch.eye(x.shape[1]), x.T @ wanted)
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": solved.T.contiguous()}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def verbs(kind: str, knobs: str = f"depth={GUESSES},width=1", **more: str) -> dict[str, str]:
    name = "dflash" if kind == "dflash" else "eagle"
    return {"draft": f"{name}:heads={heads(kind)},{knobs}", **more}


both = pytest.mark.parametrize("kind", ["dflash", "peagle"])


@both
def test_a_chain_is_what_the_plain_forward_says_at_every_pass(kind: str) -> None:
    plain, placed = files.PlainPass(heads(kind), tiny.checkpoint()), tiny.engine(verbs(kind))
    watch = Watch(placed)
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    assert watch.drafts
    for (_, known), draft in watch.drafts.items():
        best = plain.logits(text[:known], GUESSES).argmax(-1).tolist()
        assert draft.tokens == best[: len(draft.tokens)] and draft.parents == list(range(-1, len(draft.tokens) - 1))


@both
@pytest.mark.parametrize("knobs", [f"depth={GUESSES},width=1", "depth=3,width=3,nodes=7"])
def test_answers_are_the_models_own_in_fewer_passes(kind: str, knobs: str) -> None:
    placed = tiny.engine(verbs(kind, knobs))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    counters = placed.counters
    assert counters.accepted > N / 2 and counters.forwards < N, "the heads know what is written"
    assert counters.draft_forwards <= counters.forwards, "a draft is one pass"


@pytest.mark.parametrize("draft", ["dflash:heads=random:0", "dflash:heads=random:1,depth=3,width=3"])
def test_random_heads_accept_little_and_change_nothing(draft: str) -> None:
    placed = tiny.engine({"draft": draft})
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.drafted > N and placed.counters.accepted < placed.counters.drafted / 8


@both
def test_sampled_requests_are_plain_decodings_too(kind: str) -> None:
    params = [Params(N, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(3)]
    placed = tiny.engine(verbs(kind, verify="match"))
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert placed.counters.accepted > 0


@both
def test_prefix_hits_and_preemption_change_nothing_of_what_is_accepted(kind: str) -> None:
    placed = tiny.engine(verbs(kind))
    watch = Watch(placed)
    cold = [serve(placed, prompt) for prompt in PROMPTS]
    alone, watch.accepted = watch.accepted, {}
    warm = [serve(placed, prompt) for prompt in PROMPTS]
    assert [request.cached for request in warm] == [32, 64, 0]
    assert watch.accepted == alone and sum(alone.values()) > N / 2
    assert [request.out for request in warm] == [request.out for request in cold]
    watch.accepted = {}
    requests = [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    for step in range(6):
        placed.step()
        if step in (2, 4):
            assert preempt(placed, lambda i, request: True)
    tiny.finish(placed, requests)
    shared = watch.accepted.keys() & alone.keys()
    assert {key: watch.accepted[key] for key in shared} == {key: alone[key] for key in shared} and len(shared) > N / 2


def test_more_than_a_block_holds_is_refused() -> None:
    with pytest.raises(UserError, match=r"dflash: depth=9 .* up to 5 tokens"):
        tiny.engine(verbs("dflash", "depth=9"))
    with pytest.raises(UserError, match=r"eagle: depth=65 .* up to 64 tokens"):
        tiny.engine(verbs("peagle", "depth=65"))


@pytest.mark.parametrize("knobs", [{"depth": 0}, {"width": 0}, {"nodes": 0}, {"chunk": 0}])
def test_knobs_that_make_no_sense(knobs: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"dflash: {next(iter(knobs))}="):
        DFlash(**knobs)


def test_random_heads_are_of_the_published_shape() -> None:
    made, key = feature_heads(tiny.model(), ("dflash",), "random:3")
    assert key == "dflash random:3" and made.parallel == 7 and made.config.qk_norm == "head" and made.config.layers == 2
