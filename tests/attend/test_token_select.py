"""attend.token_select: soft votes, one list for a layer, lists used again along the path that stays, and bytes that
are the closed form."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.handoff import drawers, pack
from phasewise.methods.attend._select import tally
from phasewise.methods.attend.token_select import TokenSelect
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.play import LoadEntry
from phasewise.reproduce.system import Setting
from phasewise.reproduce.workload import code_ids
from phasewise.request.counters import Counters
from phasewise.verbs.host import Host
from tests import double, tiny
from tests.attend.slow_select import SlowTokens
from tests.kv.harness import Uneven, Walk

PROMPT, TOKENS = 70, tiny.prompts(130)[0]
LAYERS, HEADS, DIM = 4, 2, 12  # of the tiny model, in float32


def started(attend: Any, **more: Any) -> Walk:
    one = Walk(tiny.model(), TOKENS[:PROMPT], attend=attend, **more)
    one.feed(TOKENS[:PROMPT])
    return one


def runtime(model: Model | None = None, **knobs: Any) -> Any:
    return TokenSelect(**knobs).bind(Host(model or tiny.model(), None, Counters(), None, None))  # type: ignore[arg-type]


def held(one: Walk) -> dict[int, tuple[Tensor, Tensor]]:
    """Of every layer, the query of the row that made the list, and the list."""
    found: dict[int, tuple[Tensor, Tensor]] = one.request.state["token_select"]
    return found


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


# ---- lists that are used again
def test_a_row_is_compared_with_the_row_that_made_its_list() -> None:
    """Angles of queries, of which those up to 30 degrees apart are alike: not with the row before it, so that no list
    outlives its query by small steps, and in a tree along its own path."""
    reuse = runtime(theta=math.cos(math.radians(30.01))).reuse
    flat = range(-1, 7)

    def makers(angles: list[float], before: Sequence[int], held: float | None, acts: list[bool] | None = None) -> Any:
        at = torch.tensor(angles).deg2rad()
        mine = None if held is None else torch.tensor([math.cos(math.radians(held)), math.sin(math.radians(held))])
        known = None if mine is None else (7 * mine, torch.empty(0))
        return reuse._makers(torch.stack((at.cos(), at.sin()), 1), before, acts or [True] * len(angles), known)

    assert makers([0, 20, 40, 60, 71, 70], flat, None) == [0, 0, 2, 2, 4, 4]
    assert makers([0, 20, 40, 29], flat, 15) == [-1, -1, -1, -1]
    assert makers([50, 20], flat, 15) == [0, 0] and makers([60, 20], flat, 15) == [0, 1]
    tree = [-1, 0, 0, 1, 2]  # two branches below the first row
    assert makers([0, 40, 5, 10, 31], tree, None) == [0, 1, 0, 1, 4]
    seen = [False, True, False, True]
    assert makers([0, 20, 90, 30], flat, None, seen) == [-2, 1, 1, 1], "who may read all it sees makes none"
    assert makers([0, 20, 90, 30], flat, 10, seen) == [-1, -1, -1, -1], "and changes none"


@pytest.mark.parametrize("theta", [1.0, -1.0])
def test_thresholds_at_either_end(theta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no query is alike, outputs are those without reuse; where all are, the first list is the only one."""
    double.everything(monkeypatch)
    made = runtime(k=12, first=3, local=5)
    plain, again = started(made), started(runtime(k=12, first=3, local=5, theta=theta))
    want, got = (torch.cat([one.feed([token]) for token in TOKENS[PROMPT:110]]) for one in (plain, again))
    if theta > 0:
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
        assert again.counters.choices == made.counters.choices == 40 * (LAYERS - 1)
        assert again.counters.kv_bytes_read == plain.counters.kv_bytes_read
    else:
        torch.testing.assert_close(got[:1], want[:1], atol=1e-9, rtol=1e-9)
        assert (got[1:] - want[1:]).abs().max() > 1e-2
        assert again.counters.choices == LAYERS - 1


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_half_steps_without_alike_queries_give_the_bits_of_whole_steps() -> None:
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    found = []
    for theta in (2.0, 1.0):
        made = runtime(model, k=12, first=3, local=5, theta=theta)
        one = Walk(model, TOKENS[:PROMPT], attend=made)
        one.feed(TOKENS[:PROMPT])
        logits = [one.feed([token]) for token in TOKENS[PROMPT:]]
        whole = made.counters.choices if theta > 1 else 0  # whole steps tell the engine's counters
        found.append((logits, whole + one.counters.choices))
    (want, chosen), (got, again) = found
    assert chosen == again == 60 * (LAYERS - 1)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_queries_of_layers_that_do_not_rotate_are_kept() -> None:
    """They are compared as they lie, in memory that the next layer writes to."""
    model, found = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), []
    for look in (lambda read: read.q, lambda read: read.q.clone()):
        made = runtime(model, k=12, first=3, local=5, theta=0.1)
        made.reuse.turned = look
        one = Walk(model, TOKENS[:PROMPT], attend=made)
        one.feed(TOKENS[:PROMPT])
        found.append((torch.cat([one.feed([token]) for token in TOKENS[PROMPT:]]), one.counters.choices))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_bytes_follow_from_the_number_of_choices() -> None:
    """The rows of the list, for every token; keys of all that is ranked, and keys turned back, for choices alone."""
    one = started(runtime(k=12, first=3, local=5, theta=0.1))
    key, turned, made = HEADS * DIM * 4, dict.fromkeys(range(1, LAYERS), 0), 0
    for token in TOKENS[PROMPT:]:
        n, before, choices = one.request.computed + 1, one.counters.kv_bytes_read, one.counters.choices
        lists = {layer: each[0] for layer, each in one.request.state.get("token_select", {}).items()}
        one.feed([token])
        anew = [layer for layer, (q, _) in held(one).items() if lists.get(layer) is not q]
        assert one.counters.choices - choices == len(anew)
        expected = 2 * n + (LAYERS - 1) * 2 * 20
        for layer in anew:
            expected += n - 3 - 5 + n - 1 - turned[layer]
            turned[layer] = n - 1
        assert one.counters.kv_bytes_read - before == key * expected
        made += len(anew)
    assert 20 < made < 60 * (LAYERS - 1), "some are used again, some not"


def test_a_trained_model_makes_fewer_lists_at_the_papers_threshold() -> None:
    """Above 1 one for every decoded row and layer that chooses; the same reuse as `phasewise reproduce` counts."""
    made = {}
    with Lab.open(Scale(time=False)) as lab:
        ids = list(code_ids())
        entries = [LoadEntry(ids[start : start + 512], 24) for start in (15_831, 47_493)]
        for theta in (2.0, 0.9, 0.7):
            setting = Setting({"attend": f"token_select:k=96,first=8,local=24,theta={theta}"})
            made[theta] = lab.play(setting, entries, "pocket").work.choices
        layers = lab.model("pocket").config.layers
    assert made[2.0] == 2 * 23 * (layers - 1)
    assert made[0.7] < made[0.9] < made[2.0]


def test_rejected_rows_leave_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    double.everything(monkeypatch)
    plain, drafted = (started(runtime(k=12, first=3, local=5, theta=0.1)) for _ in range(2))
    tokens, differ = TOKENS[PROMPT : PROMPT + 24], 0
    for token in tokens:
        plain.feed([token])
    for at in range(0, 24, 2):
        first, second = tokens[at : at + 2]
        wrong = (second + 1) % tiny.VOCAB
        tree = [first, wrong, second, wrong]  # two guesses for the next token, and one behind the wrong one
        if at == 6:  # a step that failed comes again
            drafted.try_(tree, [-1, 0, 0, 1])
            drafted.kv.commit(0)
        drafted.try_(tree, [-1, 0, 0, 1])
        notes = (drafted.span.trail or {})["token_select"].values()
        differ += sum(note.makers[1] != note.makers[2] or note.makers[3] != note.makers[2] for note in notes)
        drafted.commit(tree, [0, 2])
    assert differ > 5, "wrong branches make lists of their own"
    for layer, (q, chosen) in held(plain).items():
        torch.testing.assert_close(held(drafted)[layer][0], q, atol=1e-9, rtol=1e-9)
        assert torch.equal(held(drafted)[layer][1], chosen)


@pytest.mark.parametrize("evict", [None, Uneven([[range(1, 70, 2), [*range(50), 68, 69]]] * 4)], ids=["", "uneven"])
def test_a_request_is_handed_on_with_its_lists(evict: Any) -> None:
    one = started(runtime(k=12, first=3, local=5, theta=-1.0), evict=evict)
    one.feed(TOKENS[PROMPT:90])
    there = one.fork()
    header, tensors = pack(one.request, "tiny", 0)
    there.request.state = drawers(json.loads(json.dumps(header)), tensors)
    for token in TOKENS[90:100]:
        torch.testing.assert_close(there.feed([token]), one.feed([token]), atol=0, rtol=0)
    assert held(there).keys() == held(one).keys() == {1, 2, 3}


@pytest.mark.parametrize("chunk", [0, 16])
def test_lists_and_their_queries_are_booked(chunk: int) -> None:
    plain = runtime(k=12, first=3, local=5, chunk=chunk)
    again = runtime(k=12, first=3, local=5, theta=0.1, chunk=chunk)
    one = started(again)
    one.feed(TOKENS[PROMPT:])
    for layer, kv in enumerate(one.kv.layers):
        more = again.drawer(layer, kv.shape, Room(130, 130, False))
        assert again.beside(layer, kv.shape, 130) == plain.beside(layer, kv.shape, 130)
        assert (layer in held(one)) == (layer > 0) == (more > 0)
        assert sum(each.nbytes for each in held(one).get(layer, ())) <= more
        assert again.drawer(layer, kv.shape, Room(20, 20, False)) == again.beside(layer, kv.shape, 20) == 0


@pytest.mark.parametrize("theta", [-1.1, math.nan])
def test_a_threshold_that_is_no_cosine_is_named(theta: float) -> None:
    with pytest.raises(UserError, match=f"theta={theta}"):
        TokenSelect(theta=theta)


@pytest.mark.parametrize("knob", ["k", "first", "local", "dense_layers"])
def test_bad_knobs_are_named(knob: str) -> None:
    with pytest.raises(UserError, match=f"{knob}=-1"):
        TokenSelect(**{knob: -1})
