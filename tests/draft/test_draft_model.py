"""The draft model: counted passes, its own KV rolled back exactly, and no drafts where there is no room."""

from __future__ import annotations

import pytest

from phasewise.errors import UserError
from phasewise.methods.draft.draft_model import DraftModel
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.companion import Companion
from phasewise.verbs.place import Placed
from tests import tiny

PROMPTS = tiny.prompts(30, 7, 55)


def companion(placed: Placed) -> Companion:
    (only,) = placed.recipes[""].companions
    return only


def sampled(n: int, **rules: float) -> list[Params]:
    return [Params(max_tokens=n, temperature=0.9, seed=seed, ignore_eos=True, **rules) for seed in range(3)]


@pytest.mark.parametrize("verify", ["rejection", "match"])
@pytest.mark.parametrize("how", ["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 4])
def test_the_target_as_its_own_draft_is_always_right(k: int, how: str, verify: str) -> None:
    """k + 1 tokens per pass, and the draft model sees every token exactly once: no pass for what it lags behind."""
    n = 1 + 5 * (k + 1)
    placed = tiny.engine({"draft": f"draft_model:model=tiny,k={k}", "verify": verify})
    params = [tiny.greedy(n)] * 3 if how == "greedy" else sampled(n, top_p=0.95, frequency_penalty=0.2)
    requests = tiny.run(placed, PROMPTS, params)
    counters = placed.counters
    assert counters.accepted == counters.drafted == 3 * 5 * k
    assert counters.forwards == 1 + 5
    assert counters.draft_forwards == 5 * k, "k passes per step for the whole batch"
    assert companion(placed).own.rows == sum(r.known - 2 for r in requests), "all but the last draft and the last token"


def test_one_pass_per_level_however_many_requests() -> None:
    for prompts in (PROMPTS[:1], PROMPTS, PROMPTS * 4):
        for branches in (1, 3):
            placed = tiny.engine({"draft": f"draft_model:model=tiny,k=3,branches={branches}"})
            tiny.run(placed, prompts, tiny.greedy(1 + 4 * 4))
            assert (placed.counters.draft_forwards, placed.counters.forwards) == (3 * 4, 1 + 4)


def test_rejected_rows_are_rolled_back() -> None:
    """After every step the draft model's rows are plain, and all it believes in is really known or drafted."""
    placed = tiny.engine({"draft": "draft_model:model=tiny-draft,branches=2"})
    request = Request(PROMPTS[0], tiny.greedy(20))
    placed.add(request)
    while request.left is None:
        placed.step()
        follower = request.state.get("draft_model")
        if follower is None:
            continue
        assert follower.base <= request.known and follower.rows <= request.known + 4
        for layer in follower.kv.layers:
            (slab,) = layer.slabs
            assert slab.positions is None and slab.n == follower.rows
    assert placed.counters.accepted < placed.counters.drafted


@pytest.mark.parametrize("drawn", ["point", "iid", "without_replacement", "top_plus_one"])
def test_match_gives_plain_samples(drawn: str) -> None:
    """However the guesses were drawn, `match` gives the tokens of plain sampled decoding."""
    params = sampled(25)
    want = tiny.plain(PROMPTS, params)
    placed = tiny.engine({"draft": f"draft_model:model=tiny-draft,branches=3,drawn={drawn}", "verify": "match"})
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == want
    assert 0 < placed.counters.accepted < placed.counters.drafted


def test_no_room_means_no_drafts() -> None:
    """All memory but what the request holds is taken away: it goes on by itself, and speculates again later."""
    want = tiny.plain(PROMPTS[:1], tiny.greedy(30))
    placed = tiny.engine({"draft": "draft_model:model=tiny"}, prefix_cache=False)
    request = Request(PROMPTS[0], tiny.greedy(30))
    placed.add(request)
    placed.step()
    taken = placed.store.ledger.free
    placed.store.ledger.add(taken)
    while request.n_out < 8:
        placed.step()
    assert placed.counters.draft_forwards == placed.counters.drafted == 0
    placed.store.ledger.add(-taken)
    tiny.finish(placed, [request])
    assert [request.out] == want and placed.counters.accepted > 10


def test_prefixes_make_way_for_drafts_and_requests_do_not() -> None:
    """A full prefix cache does not switch speculation off; a drafter preempts nobody."""
    placed = tiny.engine({"draft": "draft_model:model=tiny"}, kv_bytes=1_200_000)
    for seed in range(12):
        tiny_prompts = tiny.prompts(120, 100, seed=seed)
        requests = [Request(p, tiny.greedy(9)) for p in tiny_prompts]
        for request in requests:
            placed.add(request)
        while any(r.left is None for r in requests):
            placed.step()
    counters = placed.counters
    assert counters.accepted == counters.drafted > 100
    assert counters.preemptions == 0
    assert placed.prefix_bytes > 0


def test_a_long_prompt_is_read_in_pieces() -> None:
    want = tiny.plain(PROMPTS[2:], tiny.greedy(30))
    placed = tiny.engine({"draft": "draft_model:model=tiny,chunk=20"})
    assert tiny.outs(tiny.run(placed, PROMPTS[2:], tiny.greedy(30))) == want
    assert placed.counters.accepted == placed.counters.drafted > 0
    assert placed.counters.draft_forwards < 30
    own = companion(placed).own
    assert own.rows < 55 + 30 and own.forwards == placed.counters.draft_forwards


def test_state_survives_a_fork_in_mid_flight() -> None:
    """Both sides go on with the same tokens, and give all memory back."""
    for draft in ("draft_model:model=tiny-draft,branches=2", "prompt_lookup:min_match=1"):
        placed = tiny.engine({"draft": draft})
        request = Request(PROMPTS[0], tiny.greedy(30))
        placed.add(request)
        while request.n_out < 10:
            placed.step()
        twin = Request(request.prompt, request.params)
        twin.adopt(request)
        assert set(twin.state) == set(request.state) and twin.state
        placed.resume(twin)
        tiny.finish(placed, [request, twin])
        assert twin.out == request.out == tiny.plain(PROMPTS[:1], tiny.greedy(30))[0]


def test_it_works_by_its_name_alone() -> None:
    methods = parse({"draft": "draft_model"})
    assert methods["draft"] == DraftModel() and type(methods["decode"]).__name__ == "Speculative"


def test_vocabularies_must_agree() -> None:
    other = tiny.checkpoint(vocab=32, layers=1)
    with pytest.raises(UserError, match=r"32 tokens in its vocabulary, the model has 64"):
        tiny.engine({"draft": f"draft_model:model={other}"})


@pytest.mark.parametrize("knob", ["k", "branches", "chunk"])
def test_knobs_below_one_are_refused(knob: str) -> None:
    with pytest.raises(UserError, match=f"draft_model: {knob}=0 must be at least 1"):
        DraftModel(**{knob: 0})
