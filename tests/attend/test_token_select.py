"""attend.token_select: soft votes, one list for a layer, and bytes that are the closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.attend._select import tally
from phasewise.methods.attend.token_select import TokenSelect
from phasewise.request.counters import Counters
from phasewise.verbs.host import Host
from tests import tiny
from tests.attend.slow_select import SlowTokens
from tests.kv.harness import Walk

PROMPT, TOKENS = 70, tiny.prompts(130)[0]
LAYERS, HEADS, DIM = 4, 2, 12  # of the tiny model, in float32


def started(attend: Any) -> Walk:
    one = Walk(tiny.model(), TOKENS[:PROMPT], attend=attend)
    one.feed(TOKENS[:PROMPT])
    return one


def runtime(**knobs: Any) -> Any:
    return TokenSelect(**knobs).bind(Host(tiny.model(), None, Counters(), None, None))  # type: ignore[arg-type]


def test_a_loud_head_has_one_vote_like_all_others() -> None:
    """Of six heads five look at row 7, mildly; one screams at row 2. A sum of scores follows it, soft votes do not."""
    logits = torch.zeros(1, 6, 1, 20)
    logits[0, :5, 0, 7] = 5.0
    logits[0, 5, 0, 2] = 1000.0
    assert int(logits.sum(1).argmax()) == 2
    votes = tally(logits, None)[0, 0]
    assert int(votes.argmax()) == 7
    torch.testing.assert_close(votes.exp().sum(), torch.tensor(6.0))


def test_votes_too_small_for_a_float_are_still_ranked() -> None:
    logits = torch.tensor([0.0, -400.0, -300.0, -500.0]).view(1, 1, 1, 4)
    assert tally(logits, None)[0, 0].argsort(descending=True).tolist() == [0, 2, 1, 3]


def test_rows_that_are_no_candidates_get_no_vote() -> None:
    among = torch.tensor([True, False, True]).view(1, 1, 3)
    votes = tally(torch.tensor([1.0, 50.0, 2.0]).view(1, 1, 1, 3), among)[0, 0]
    assert votes[1] == float("-inf")
    torch.testing.assert_close(votes.exp().sum(), torch.tensor(1.0))


def test_all_heads_of_a_layer_read_the_same_rows() -> None:
    """By the book (the fast way is held to it elsewhere): one list, of first, last and chosen rows."""
    slow = SlowTokens(12, 3, 5)
    one = started(slow)
    for token in TOKENS[PROMPT:90]:
        one.feed([token])
    for (layer, head, at), rows in slow.selected.items():
        assert rows == slow.selected[layer, 0, at] and len(rows) == 20
        assert rows[:3] == [0, 1, 2] and rows[-5:] == list(range(at - 4, at + 1)), head


def test_the_kept_keys_are_as_before_rotation() -> None:
    one = started(runtime(k=12, first=3, local=5))
    for token in TOKENS[PROMPT:90]:
        one.feed([token])
    (part,) = one.kv.layers[2].read()
    kept = one.kv.layers[2].derived["token_select", 0]
    again = tiny.model().rotate(2, kept.known, torch.arange(kept.upto)[None])  # type: ignore[attr-defined]
    torch.testing.assert_close(again, part.k[:, : kept.upto], atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]


def test_bytes_read_are_the_closed_form() -> None:
    """The rows of the list, one key of every row that is ranked, and keys that are turned back, each once."""
    one = started(runtime(k=12, first=3, local=5))
    key, turned = HEADS * DIM * 4, 0
    for token in TOKENS[PROMPT:]:
        n, before = one.request.computed + 1, one.counters.kv_bytes_read
        one.feed([token])
        assert one.counters.kv_bytes_read - before == key * (
            2 * n + (LAYERS - 1) * (2 * 20 + n - 3 - 5 + n - 1 - turned)
        )
        turned = n - 1


@pytest.mark.parametrize("knob", ["k", "first", "local", "dense_layers"])
def test_bad_knobs_are_named(knob: str) -> None:
    with pytest.raises(UserError, match=f"{knob}=-1"):
        TokenSelect(**{knob: -1})
