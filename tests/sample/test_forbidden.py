"""What a request forbids is never said, whoever drafts and verifies; the rest of the distribution is as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.methods.sample.standard import Standard
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Context
from tests import tiny
from tests.laws.settings import options

N = 16
EOS = 2
FREE = Params(max_tokens=N)
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.5, "seed": 5}}
METHODS = [("draft", name) for name in catalog.names("draft")] + [("verify", name) for name in catalog.names("verify")]
METHODS += [("decode", "contrastive"), ("place", "disaggregated"), ("schedule", "layered")]


def probs(params: Params, path: tuple[int, ...] = (), out: tuple[int, ...] = ()) -> torch.Tensor:
    """Of the token after prompt 5, 6, 7, what was put `out` and a draft's path; the model finds all likely."""
    request = Request([5, 6, 7], params)
    request.tokens += out
    request.ends = (EOS,)
    logits = torch.linspace(0, 1, 16)[None]
    return Standard()(logits, [Context(request, path)]).row(0)


def test_allowed_tokens() -> None:
    params = Params(temperature=1.0, allowed_token_ids=(3, 9))
    found, free = probs(params), probs(replace(params, allowed_token_ids=None))
    assert found.nonzero()[:, 0].tolist() == [3, 9]
    assert found[9] / found[3] == pytest.approx(float(free[9] / free[3]))


@pytest.mark.parametrize(("out", "path"), [((), ()), ((8,), ()), ((), (8,)), ((8,), (8,))])
def test_ends_that_come_too_early(out: tuple[int, ...], path: tuple[int, ...]) -> None:
    params = Params(temperature=1.0, min_tokens=2, stop_tokens=(4,))
    gone = [2, 4] if len(out) + len(path) < 2 else []
    assert (probs(params, path, out) == 0).nonzero()[:, 0].tolist() == gone
    gone = [4] if gone else []
    assert (probs(replace(params, ignore_eos=True), path, out) == 0).nonzero()[:, 0].tolist() == gone


@pytest.mark.parametrize(
    ("out", "path", "gone"),
    [((), (), [10]), ((6,), (), [1]), ((), (6,), [1]), ((6,), (7,), [8]), ((), (6, 7), [8]), ((7,), (), [])],
)
def test_bad_words(out: tuple[int, ...], path: tuple[int, ...], gone: list[int]) -> None:
    params = Params(temperature=1.0, bad_words=((9,), (6, 1), (6, 7, 8), (5, 6, 7, 10)))
    assert (probs(params, path, out) == 0).nonzero()[:, 0].tolist() == sorted(
        [9, *gone, *([8] if not (out or path) else [])]
    )


def test_bad_words_give_way_where_nothing_else_is_left() -> None:
    params = Params(temperature=1.0, bad_words=((7, 3), (7, 4)), allowed_token_ids=(3, 4))
    assert probs(params).nonzero()[:, 0].tolist() == [3, 4]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("verb", "name"), METHODS)
def test_with_every_method(verb: str, name: str, mode: str) -> None:
    """Guesses that the rules forbid are refused; the tokens that the model would say, else, are taken from it."""
    verbs, prompts = options(verb, name), tiny.prompts(41, 7)
    prompts.append(prompts[0] * 2)
    free = tiny.run(tiny.engine(verbs), prompts, replace(FREE, ignore_eos=True, **MODES[mode]))
    pairs = {(a, b) for request in free for a, b in zip(request.tokens[request.prompt_len - 1 :], request.out)}
    ends = tuple({request.out[1] for request in free})
    allowed = tuple(range(3, tiny.VOCAB, 2))
    some = sorted(pairs)[::3]
    for rules in ({"bad_words": some}, {"min_tokens": 9, "stop_tokens": ends}, {"allowed_token_ids": allowed}):
        for request in tiny.run(tiny.engine(verbs), prompts, replace(FREE, **MODES[mode], **rules)):
            assert request.left is not None and request.left.how == "finished", request.left
            if "bad_words" in rules:
                said = set(zip(request.tokens[request.prompt_len - 1 :], request.out))
                assert not said & set(some)
            elif "min_tokens" in rules:
                assert request.n_out >= 9 and not set(request.out[:8]) & {*ends, EOS}
            else:
                assert set(request.out) <= set(allowed)


def test_diffusion_keeps_what_needs_no_order() -> None:
    verbs = options("decode", "block_diffusion")
    for request in tiny.run(tiny.engine(verbs), tiny.prompts(9), replace(FREE, allowed_token_ids=(5, 6), min_tokens=N)):
        assert request.n_out == N and set(request.out) <= {5, 6}
    with pytest.raises(UserError, match="bad words of several tokens"):
        tiny.engine(verbs).add(Request([3], Params(bad_words=((3, 4),))))
    for request in tiny.run(tiny.engine(verbs), tiny.prompts(9), replace(FREE, bad_words=((5,), (6,)))):
        assert not {5, 6} & set(request.out)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"allowed_token_ids": (3, 64)}, "allowed_token_ids names token id 64"),
        ({"bad_words": ((3, 99),)}, "bad_words names token id 99"),
        ({"bad_words": ("fox",)}, "are texts, which an LLM turns into token ids"),
        ({"bad_words": ((3,), (4,)), "allowed_token_ids": (3, 4)}, "are all forbidden"),
        ({"allowed_token_ids": (EOS, 7), "stop_tokens": (7,), "min_tokens": 1}, "are all forbidden"),
    ],
)
def test_what_cannot_be_kept_is_refused(fields: dict[str, Any], what: str) -> None:
    placed = tiny.engine()
    with pytest.raises(UserError, match=what):
        placed.add(Request([3, 4], Params(**fields)))
    assert placed.idle


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"allowed_token_ids": ()}, "allowed_token_ids=\\(\\) must be token ids, at least one"),
        ({"allowed_token_ids": ("a",)}, "allowed_token_ids"),
        ({"bad_words": "fox"}, "bad_words='fox' must be a list"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": (5,)}, "bad_words"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens=20 is more than max_tokens=10"),
        ({"min_tokens": -1}, "min_tokens=-1 is out of range"),
        ({"skip_special_tokens": 1}, "skip_special_tokens=1 must be True or False"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output='yes'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 is out of range"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        Params(**fields)
