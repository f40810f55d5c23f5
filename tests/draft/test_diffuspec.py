"""DiffuSpec and GAD in the engine: guesses are the plain forward's, and answers plain decoding's.

The draft has learned what the tiny model writes, by the trainer's own loss, so that guesses are often right.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.methods.draft._masked_block import MaskedBlockDrafter
from phasewise.methods.draft.diffuspec import DiffuSpec
from phasewise.methods.draft.gad import GAD
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.diffuspec_layout import TRIGRAMS
from phasewise.speculation.trigrams import SmoothedTrigrams
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.heads.diffuspec import MaskedDecoder, MaskedDraftKind
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import NO_LOSS, pad_rows
from phasewise.train.written import WrittenText
from phasewise.verbs.draft import Draft
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.laws.engines import engines, preempt
from tests.speculation.diffuspec_files import PlainBlock

GUESSES = 6


@cache
def heads() -> Path:
    """A draft for `tiny.model()` that knows what it writes after `PROMPTS`."""
    out, kind = Path(tempfile.mkdtemp(prefix="phasewise-heads-")), MaskedDraftKind()
    target = FrozenTarget(str(tiny.checkpoint()))
    answers = tiny.plain(PROMPTS, tiny.greedy(N))
    block = pad_rows([[(p, False), (a, True)] for p, a in zip(PROMPTS, answers)], 0)
    torch.manual_seed(0)
    module = MaskedDecoder(DenseDecoder(DenseShape(tiny.VOCAB + 1, 64, 2, 2, 1, 96, 32, 1024)), GUESSES)
    module.count([WrittenText(p, a) for p, a in zip(PROMPTS, answers)])
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(200):
        adam.zero_grad()
        ids = torch.cat((block.ids, torch.full((len(PROMPTS), 1), step % 60)), 1)  # so that blocks begin at all places
        kind.loss(module, target, [TokenBlock.of(ids, F.pad(block.targets, (0, 1), value=NO_LOSS))]).total.backward()
        adam.step()
    folder.write(out, kind.config(module, target), kind.tensors(module))
    return out


def verbs(name: str = "diffuspec", knobs: str = "", **more: str) -> dict[str, str]:
    lengths = "k=4" if name == "gad" else "least=2,most=6"
    return {"draft": f"{name}:heads={heads()},{knobs or lengths}", **more}


SETTINGS = [
    ("diffuspec", ""),
    ("diffuspec", "least=2,most=6,path=argmax"),
    ("diffuspec", "least=6,most=6"),
    ("gad", ""),
]


class Watch:
    """Drafts and the number of accepted guesses of every pass, by the prompt's length and the number of tokens then."""

    def __init__(self, placed: Any) -> None:
        self.drafts: dict[tuple[int, int], Draft] = {}
        self.accepted: dict[tuple[int, int], int] = {}
        for engine in engines(placed):
            for phase in engine.recipes[""].phases:
                drafter = phase.decode.drafter
                assert isinstance(drafter, MaskedBlockDrafter)
                if "learn" not in vars(drafter):
                    self.watch(drafter)

    def watch(self, drafter: Any) -> None:
        learn = drafter.learn

        def watched(spans: Any, hidden: Any, outcomes: Any, tops: Any = None) -> None:
            for span, outcome in zip(spans, outcomes):
                if span.note is not None:
                    key = len(span.request.prompt), span.request.known
                    self.drafts[key], self.accepted[key] = span.note, outcome.accepted
            learn(spans, hidden, outcomes, tops)

        drafter.learn = watched


def test_guesses_are_the_likeliest_of_the_plain_forward_at_every_pass() -> None:
    plain, placed = PlainBlock(heads()), tiny.engine(verbs("gad"))
    watch = Watch(placed)
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    assert watch.drafts
    for (_, known), draft in watch.drafts.items():
        k = len(draft.tokens)
        assert draft.tokens == plain.logits(text[:known], k).argmax(-1).tolist() and k == min(4, len(text) - known - 1)
        assert draft.parents == list(range(-1, k - 1)) and draft.likely is not None and len(draft.likely) == k


def test_a_path_is_the_best_that_the_search_finds_in_what_the_plain_forward_says() -> None:
    placed, method = tiny.engine(verbs(knobs="least=5,most=5,beams=2,tau=0.99")), DiffuSpec(beams=2, tau=0.99)
    watch, plain, stored = Watch(placed), PlainBlock(heads()), folder.read(heads())
    trigrams = SmoothedTrigrams(stored.tensors[TRIGRAMS], tiny.VOCAB)
    tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(N)))
    text = [*PROMPTS[2], *tiny.plain(PROMPTS, tiny.greedy(N))[2]]
    for (_, known), draft in watch.drafts.items():
        k = min(5, len(text) - known - 1)
        rows = method.search.candidates(plain.logits(text[:known], k), {2})
        path = method.search.best(rows, text[:known], {2}, trigrams.log_chance)
        assert draft.tokens == [token for token, _ in path]


@pytest.mark.parametrize(("name", "knobs"), SETTINGS)
def test_answers_are_the_models_own_in_fewer_passes(name: str, knobs: str) -> None:
    placed = tiny.engine(verbs(name, knobs))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    counters = placed.counters
    assert counters.accepted > N and counters.forwards < N, "the draft knows what is written"
    assert counters.draft_forwards <= counters.forwards, "a draft is one pass"


@pytest.mark.parametrize("draft", ["diffuspec:heads=random:0", "diffuspec:heads=random:1,lam=0", "gad:heads=random:0"])
def test_random_drafts_accept_little_and_change_nothing(draft: str) -> None:
    placed = tiny.engine({"draft": draft})
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.drafted > N and placed.counters.accepted < placed.counters.drafted / 8


@pytest.mark.parametrize("verify", ["match", "rejection"])
@pytest.mark.parametrize(("name", "knobs"), SETTINGS[::3])
def test_sampled_requests_are_plain_decodings_too(name: str, knobs: str, verify: str) -> None:
    """Guesses that were chosen leave the target's random numbers as they are."""
    params = [Params(N, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(3)]
    placed = tiny.engine(verbs(name, knobs, verify=verify))
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert placed.counters.accepted > 0


@pytest.mark.parametrize(("name", "knobs"), [SETTINGS[2], SETTINGS[3]])
def test_prefix_hits_and_preemption_change_nothing_of_what_is_accepted(name: str, knobs: str) -> None:
    """Of fixed lengths, which hang on the text alone."""
    placed = tiny.engine(verbs(name, knobs))
    watch = Watch(placed)
    for prompt in PROMPTS:
        tiny.run(placed, [prompt], tiny.greedy(N))
    alone, watch.accepted = watch.accepted, {}
    requests = [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    for step in range(6):
        placed.step()
        if step in (2, 4):
            assert preempt(placed, lambda i, request: True)
    tiny.finish(placed, requests)
    again = {key: n for key, n in watch.accepted.items() if key in alone}
    assert again == {key: alone[key] for key in again} and len(again) > 3 and sum(again.values()) > N / 2


def test_the_length_follows_what_is_accepted() -> None:
    """With heads that know the text it stays long; with random ones it falls to half of the most, where the average of
    generated tokens stays, as no end is ever generated."""
    lengths = []
    for source in (str(heads()), "random:0"):
        placed = tiny.engine({"draft": f"diffuspec:heads={source},least=2,most=6,delta=4"})
        watch = Watch(placed)
        tiny.run(placed, PROMPTS[:1], tiny.greedy(N))
        lengths.append([len(draft.tokens) for _, draft in sorted(watch.drafts.items(), key=lambda each: each[0][1])])
    knowing, random = lengths
    assert knowing[0] == random[0] == 6 and random[1:-3] == [3] * len(random[1:-3]) and sum(knowing) / len(knowing) > 3


def test_with_top_beta_gad_is_exact_at_1_and_not_at_3() -> None:
    """The paper's acceptance: one of the likeliest tokens, not much less likely than the best."""
    plain = tiny.plain(PROMPTS, tiny.greedy(N))
    outs = [tiny.outs(tiny.run(tiny.engine(verbs("gad", verify=rule)), PROMPTS, tiny.greedy(N)))
            for rule in ("top_beta:beta=1", "top_beta:beta=1,tau=0", "top_beta:beta=3,tau=100")]  # fmt: skip
    assert outs[:2] == [plain] * 2
    random = {"draft": "gad:heads=random:0,k=4", "verify": "top_beta:beta=3,tau=100"}
    assert outs[2] != plain or tiny.outs(tiny.run(tiny.engine(random), PROMPTS, tiny.greedy(N))) != plain


def test_a_long_prompt_is_read_in_pieces() -> None:
    placed = tiny.engine(verbs(knobs="least=2,most=6,chunk=16"))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert placed.counters.drafted > 0


def test_little_memory_takes_guesses_and_no_token() -> None:
    placed = tiny.engine(verbs(), kv_bytes=400_000)
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))


def test_more_than_a_pass_fills_is_refused() -> None:
    with pytest.raises(UserError, match=r"diffuspec: 7 guesses are too many: .* up to 6 places"):
        tiny.engine(verbs(knobs="most=7"))
    with pytest.raises(UserError, match=r"gad: 8 guesses are too many"):
        tiny.engine({"draft": f"gad:heads={heads()}"})


WRONG = [{"least": 0}, {"least": 9}, {"most": 64}, {"beams": 0}, {"candidates": 0}, {"chunk": 0}, {"delta": -1},
         {"path": "best"}, {"rho": 1.5}, {"tau": -0.1}, {"lam": 2.0}]  # fmt: skip


@pytest.mark.parametrize("knobs", WRONG, ids=str)
def test_knobs_that_make_no_sense(knobs: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"diffuspec: .*{next(iter(knobs))}="):
        DiffuSpec(**knobs)


@pytest.mark.parametrize("knobs", [{"k": 0}, {"k": 64}, {"chunk": 0}], ids=str)
def test_knobs_of_gad_that_make_no_sense(knobs: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"gad: {next(iter(knobs))}="):
        GAD(**knobs)
