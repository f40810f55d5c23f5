"""What every drafter with trained heads keeps to: tokens are plain decoding's, guesses are those of its plain forward,
and nothing that happens to a request changes what is accepted. `trained.py` lists them; tests of what one of them alone
does stand in its own file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from phasewise.builder import Builder
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.load import model_path
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse, parse_recipes
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation import first_layers
from tests import tiny
from tests.draft.fitted import PROMPTS, N
from tests.draft.trained import DRAFTERS, HIDDEN_TRANSFER, KANGAROO, TrainedDrafter
from tests.draft.watch import Moment, Watch, check_chains, run_disturbed, serve, watched
from tests.engine.engines import Boom, step_all

EVENTS: dict[str, dict[str, str]] = {  # methods beside which each happens
    "slices": {"schedule": "sarathi:budget=40"}, "fork": {"schedule": "sarathi:budget=40"},
    "hand-off": {"place": "disaggregated:local=1"}, "mates": {},
}  # fmt: skip
SCHEDULES = ("layered:rows_per_group=8", "sarathi:budget=24", "prefill_first")


def each(names: str, cases: Callable[[TrainedDrafter], Iterable[Any]] | None = None) -> pytest.MarkDecorator:
    """Cases of a law: every drafter, with each of what `cases` finds in its entry."""
    found = list[Any]()
    for drafter in DRAFTERS:
        for case in cases(drafter) if cases else ((),):
            values = case if isinstance(case, tuple) else (case,)
            found.append(pytest.param(drafter, *values, id="-".join([drafter.name, *map(str, values)])))
    return pytest.mark.parametrize(names, found)


# ---- tokens
@each("drafter, knobs", lambda drafter: (drafter.knobs, *drafter.more))
def test_greedy_tokens_are_plain_decodings(drafter: TrainedDrafter, knobs: str) -> None:
    placed = tiny.engine(drafter.verbs(knobs))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    c = placed.counters
    assert c.accepted > drafter.accepted and c.accepted > drafter.share * c.drafted, "the heads know what is written"
    assert c.forwards < drafter.passes
    assert not drafter.one_pass or c.draft_forwards <= c.forwards, "a draft is one pass"


@each("drafter, options", lambda drafter: drafter.random)
def test_random_heads_accept_little_and_change_nothing(drafter: TrainedDrafter, options: str) -> None:
    placed = tiny.engine({"draft": f"{drafter.method}:{options}"})
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    c = placed.counters
    assert c.drafted > N and c.accepted < c.drafted * drafter.luck and c.forwards > 2 * N / 3


@each("drafter, verify", lambda drafter: drafter.verify)
def test_sampled_tokens_are_plain_decodings_too(drafter: TrainedDrafter, verify: str) -> None:
    params = [Params(N, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(3)]
    placed = tiny.engine(drafter.verbs(verify=verify))
    assert tiny.outs(tiny.run(placed, PROMPTS, params)) == tiny.plain(PROMPTS, params)
    assert placed.counters.accepted > 0


@each("drafter", lambda drafter: ((),) if drafter.says else ())
def test_a_chain_is_what_the_plain_forward_says_at_every_pass(drafter: TrainedDrafter) -> None:
    assert drafter.says
    watch = watched(drafter.verbs(drafter.chain), PROMPTS[2:], drafter.tokens)
    check_chains(watch, drafter.says(drafter.heads()))


# ---- whatever happens to a request
@each("drafter")
def test_prefix_hits_change_nothing_of_what_is_accepted(drafter: TrainedDrafter) -> None:
    """What was computed for one request serves another one: features, states and the KV of heads come along, and so
    it is where all three run at once."""
    placed, alone = tiny.engine(drafter.verbs(drafter.steady)), drafter.alone().accepted
    watch = Watch(placed)
    cold = [serve(placed, prompt) for prompt in PROMPTS]
    assert [request.cached for request in cold] == [0, 0, 0]
    assert watch.accepted == alone and sum(alone.values()) > drafter.accepted
    watch.forget()
    warm = tiny.run(placed, PROMPTS, tiny.greedy(N))
    assert [request.cached for request in warm] == [32, 64, 0] and watch.accepted == alone
    for found in (cold, warm):
        assert tiny.outs(found) == tiny.plain(PROMPTS, tiny.greedy(N))
        assert all(request.state == {} for request in found)


@each("drafter")
def test_preemption_changes_nothing_of_what_is_accepted(drafter: TrainedDrafter) -> None:
    """Three requests lose their KV twice. The pass after rows were computed anew may have nothing to guess by."""
    placed = tiny.engine(drafter.verbs(drafter.steady))
    watch, requests = Watch(placed), [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    run_disturbed(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, tiny.greedy(N))
    guessed = {moment for moment, draft in watch.drafts.items() if len(draft.tokens) > draft.ask}
    if not drafter.by_last_pass:
        shared = same(watch, drafter, guessed)
        assert len(shared) > drafter.kept
        assert sum(watch.accepted[moment] for moment in shared) > drafter.kept_accepted


@each("drafter, event", lambda drafter: drafter.events)
def test_nothing_that_happens_changes_what_is_accepted(drafter: TrainedDrafter, event: str) -> None:
    """Pass by pass as many guesses are right as when requests are alone, in one piece and undisturbed."""
    placed = tiny.engine(drafter.verbs(drafter.steady, **EVENTS[event]))
    watch, requests = Watch(placed), [Request(prompt, tiny.greedy(N)) for prompt in PROMPTS]
    if event == "fork":
        requests += [request.sibling(1) for request in requests]
    for request in requests:
        placed.add(request)
    tiny.finish(placed, requests)
    assert tiny.outs(requests)[:3] == tiny.plain(PROMPTS, tiny.greedy(N))
    shared, alone = same(watch, drafter, watch.accepted.keys()), drafter.alone().accepted
    assert len(shared) == len(watch.accepted) and len(shared) > len(alone) * 0.8


def same(watch: Watch, drafter: TrainedDrafter, among: Iterable[Moment]) -> set[Moment]:
    """The passes among these at which the drafter alone has been as well, and has had as much accepted."""
    alone = drafter.alone().accepted
    shared = watch.accepted.keys() & alone.keys() & set(among)
    assert {moment: watch.accepted[moment] for moment in shared} == {moment: alone[moment] for moment in shared}
    return shared


@each("drafter, schedule", lambda drafter: SCHEDULES if drafter.in_pass else ())
def test_mates_and_slices_change_nothing(drafter: TrainedDrafter, schedule: str) -> None:
    """Prompts that cross the model in pieces, rows of other recipes and drafts that there are too few rows for share
    steps with rows that guess. The KV of all layers is level after every step."""
    limits, names = Limits(kv_bytes=64 << 20), ("own", "other", "plain")
    recipes = parse_recipes({}, {"own": drafter.verbs(), "other": {"draft": "prompt_lookup"}, "plain": {}})
    placed = Builder(tiny.model(), parse({"schedule": schedule}), limits, load=tiny.load, recipes=recipes).build()
    assert isinstance(placed, Engine)
    requests = [Request(prompt, tiny.greedy(N), recipe=name) for prompt in PROMPTS for name in names]
    later = requests[6:]
    for request in requests[:6]:
        placed.add(request)

    def level() -> None:
        if later:
            placed.add(later.pop(0))
        for request in placed.running:
            if request.kv is not None and request.slice is None:
                assert len({layer.n for layer in request.kv.layers}) == 1

    for _ in range(4):
        placed.step()
        level()
    step_all(placed, requests, level)
    want = [out for out in tiny.plain(PROMPTS, tiny.greedy(N)) for _ in names]
    assert tiny.outs(requests) == want and placed.counters.accepted > 0


@each("drafter, verbs", lambda drafter: drafter.over)
def test_over_other_methods_it_changes_nothing(drafter: TrainedDrafter, verbs: dict[str, str]) -> None:
    want = tiny.plain(PROMPTS, tiny.greedy(N), verbs)
    placed = tiny.engine(drafter.verbs(**verbs))
    assert tiny.outs(tiny.run(placed, PROMPTS, tiny.greedy(N))) == want
    assert placed.counters.accepted > 0


# ---- costs, to the byte and to the row
@each("drafter", lambda drafter: ((),) if drafter.state_bytes is not None else ())
def test_its_memory_is_the_requests(drafter: TrainedDrafter) -> None:
    """Keys and values of the heads, features and what else a request holds are in the budget."""
    held = list[int]()
    for verbs in ({}, drafter.verbs()):
        placed = tiny.engine(verbs, prefix_cache=False)
        request = Request(PROMPTS[1], tiny.greedy(N))
        placed.add(request)
        while request.n_out < 10 and request.left is None:
            placed.step()
        held.append(placed.kv_bytes)
        if verbs:
            features, its = request.state[f"{drafter.method} features"], request.state[drafter.method]
            state = sum(each.numel() * each.element_size() for each in getattr(its, "state", ()))
            assert its.kv.bytes > 0 and state == drafter.state_bytes
            assert held[1] - held[0] >= its.kv.bytes + features["rows"].nbytes + state
        tiny.finish(placed, [request])


@each("drafter, knobs, least, most", lambda drafter: drafter.costs)
def test_a_pass_runs_its_guesses_and_the_rows_that_guess_once(
    drafter: TrainedDrafter, knobs: str, least: int, most: int
) -> None:
    """No pass beside the model's own, and no more KV after one than tokens were accepted."""
    placed: Any = tiny.engine(drafter.verbs(knobs))
    watch, kept = Watch(placed), list[tuple[int, int]]()
    request = Request(PROMPTS[1], tiny.greedy(N))
    placed.add(request)
    while request.left is None:
        placed.step()
        if request.kv is not None:
            kept.append((request.kv.layers[0].n, request.known))
            assert len({layer.n for layer in request.kv.layers}) == 1
    c, drafts = placed.counters, watch.drafts.values()
    asked, judged = sum(draft.ask for draft in drafts), sum(len(draft.tokens) - draft.ask for draft in drafts)
    assert all(rows == known - 1 for rows, known in kept) and len(kept) > 3
    assert c.emitted == c.forwards + c.accepted and c.drafted == judged and c.draft_forwards == 0
    assert c.rows == len(PROMPTS[1]) + c.forwards - 1 + judged + asked
    assert least <= max(len(draft.tokens) for draft in drafts) <= most


# ---- guesses that begin in the middle of the model
LATER = (KANGAROO, HIDDEN_TRANSFER)
of_later = pytest.mark.parametrize("drafter", LATER, ids=[drafter.name for drafter in LATER])


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("store", ["slab", "int8"])
@of_later
def test_in_bfloat16_tokens_are_those_of_whole_passes(drafter: TrainedDrafter, store: str) -> None:
    """By native calls of some layers, one row at a time and then several, as by those of all layers."""
    model = Model.load(model_path("pocket"))
    prompts, params = tiny.prompts(40, 9, 90, vocab=model.config.vocab), tiny.greedy(32)
    knobs, outs = {"kangaroo": "stop=0.05", "hidden_transfer": "nodes=6"}[drafter.name], []
    for verbs in ({"store": store}, drafter.verbs(knobs, "random:0", store=store)):
        placed = Builder(model, parse(verbs), Limits(kv_bytes=64 << 20), load=tiny.load).build()
        outs.append(tiny.outs(tiny.run(placed, prompts, params)))
    assert outs[0] == outs[1]


@pytest.mark.parametrize(("drafter", "where", "calls"), [
    pytest.param(drafter, where, calls, id=f"{drafter.name}-{where}-{calls}")
    for drafter, many in ((KANGAROO, (0, 1, 3)), (HIDDEN_TRANSFER, (0, 2)))
    for where, calls in product(("first", "others"), many)
])  # fmt: skip
def test_whoever_raises_leaves_no_rows_behind(
    drafter: TrainedDrafter, where: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first layers, or after those behind: only the culprit fails, and nothing is left uncommitted."""
    left, real = [calls], first_layers.forward

    def breaks(spans: Any) -> None:
        if any(span.request.id == "bad" and (where == "first" or span.note is not None) for span in spans):
            left[0] -= 1
            if left[0] < 0:
                raise Boom("on the way")

    def broken(model: Model, spans: Any, *more: Any) -> Any:
        found = real(model, spans, *more)
        breaks(spans)
        return found

    def broken_accept(self: Any, spans: Any, hidden: Any) -> Any:
        breaks(spans)
        return accept(self, spans, hidden)

    placed: Any = tiny.engine(drafter.verbs())
    decode = placed.recipes[""].phases[-1].decode
    accept = type(decode).accept
    if where == "first":
        monkeypatch.setattr(first_layers, "forward", broken)
    else:
        monkeypatch.setattr(type(decode), "accept", broken_accept)
    requests = [Request(p, tiny.greedy(N), id="bad" if i == 1 else f"good-{i}") for i, p in enumerate(PROMPTS)]
    for request in requests:
        placed.add(request)
    step_all(placed, requests)
    want, bad = tiny.plain(PROMPTS, tiny.greedy(N)), requests.pop(1)
    assert bad.left is not None and (bad.left.how, bad.left.reason) == ("failed", "Boom: on the way")
    assert [request.out for request in requests] == [want[0], want[2]]


@pytest.mark.parametrize(("verbs", "why"), [
    ({"attend": "quest"}, "chooses what rows read"),
    ({"evict": "streaming"}, "ranks rows by what all layers"),
    ({"store": "zipcache"}, "ranks rows by what all layers"),
    ({"skip": "unified:speedup=2,weights=none"}, "decides which layers run"),
    ({"verify": "typical"}, "choose an exact verifier"),
], ids=str)  # fmt: skip
@of_later
def test_methods_that_choose_among_rows_or_layers_are_refused(
    drafter: TrainedDrafter, verbs: dict[str, str], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        tiny.engine(drafter.verbs(**verbs))


# ---- bad input
@each("drafter, knobs, why", lambda drafter: drafter.wrong)
def test_knobs_out_of_range_are_named(drafter: TrainedDrafter, knobs: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse({"draft": f"{drafter.method}:{knobs}"})


@each("drafter, change, why", lambda drafter: drafter.unfit)
def test_files_that_do_not_fit_are_named(
    drafter: TrainedDrafter, change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    assert drafter.written
    with pytest.raises(UserError, match=why):
        tiny.engine(drafter.verbs(source=drafter.written(tmp_path, **change)))


@each("drafter", lambda drafter: ((),) if drafter.written else ())
def test_other_drafters_name_the_one_that_reads_its_files(drafter: TrainedDrafter, tmp_path: Path) -> None:
    assert drafter.written
    with pytest.raises(UserError, match=f"--draft {drafter.method}:heads="):
        tiny.engine({"draft": f"eagle:heads={drafter.written(tmp_path)}"})
