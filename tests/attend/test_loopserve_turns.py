"""attend.loopserve over KV that an earlier turn left (`decode=pie`): new rows alone are computed, over lines that are
found for them, and what is left of that is never anybody's prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from phasewise import catalog
from phasewise.builder import Builder
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv.retained import InjectedKV
from phasewise.methods.attend import _lines
from phasewise.methods.attend._lines import AttentionLines, masses, sampled
from phasewise.methods.attend.loopserve import NAME, Looping, LoopServe
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse
from phasewise.request.request import Request
from phasewise.step.read import Read
from phasewise.verbs.host import Host
from tests import seeds, tiny
from tests.attend.slow_loop import SlowLoop
from tests.attend.test_loopserve import LAYERS, TIGHT, Watched, runtime, state
from tests.decode.test_pie import EDITS, OTHER, TEXT, after, built, edited, fresh, serve
from tests.kv.harness import Walk

KNOBS = "alpha=0.6,budget=10,every=6,block=4,sample=16,voters=6"
VERBS = {"decode": "pie:least=4", "attend": f"loopserve:{KNOBS}"}
ALL = {"decode": "pie:least=4", "attend": "loopserve:alpha=1.0,budget=1000000"}
PROMPT, TOKENS, N = 70, tiny.prompts(130)[0], 12


# ---- by hand
def turn(attend: Any, history: int, rows: Any = None, **more: Any) -> Walk:
    """A prompt whose first rows are given: those that the method has computed for them as a prompt, or these."""
    one = Walk(tiny.model(), TOKENS[:PROMPT], attend=attend, **more)
    one.plain = one.phase
    if rows is None:
        first = Walk(tiny.model(), TOKENS[:history], attend=attend, **more)
        first.plain = first.phase
        first.feed(TOKENS[:history])
        rows = [layer.read()[0].between(0, history) for layer in first.kv.layers]
    with torch.inference_mode():
        one.kv.inject(InjectedKV(rows, True), 0)
    one.request.computed = history
    one.given = rows  # type: ignore[attr-defined]
    one.logits = one.feed(TOKENS[history:PROMPT])  # type: ignore[attr-defined]
    return one


@pytest.mark.parametrize(("knobs", "history"), seeds.params([
    (TIGHT, 4), (TIGHT, 67), (LoopServe(0.5, 20, 0, 8, 5), 41), (LoopServe(0.9, 3, 1, 1, 70, 9), 64),
    (LoopServe(0.9, 3, 1, 1, 70, 9), 69),
], 2, "loopserve's turns"))  # fmt: skip
def test_new_rows_read_lines_of_their_own_over_old_keys_and_new(knobs: LoopServe, history: int) -> None:
    """Against dense attention under the mask of lines found row by row; also where fewer rows are new than vote."""
    slow = SlowLoop(knobs)
    fast = turn(runtime(knobs), history)
    book = turn(slow, history, fast.given)  # type: ignore[attr-defined]
    torch.testing.assert_close(fast.logits, book.logits, atol=2e-4, rtol=2e-4)  # type: ignore[attr-defined]
    for token in TOKENS[PROMPT:100]:
        torch.testing.assert_close(fast.feed([token]), book.feed([token]), atol=2e-4, rtol=2e-4)
    size, read = knobs.block, {key: rows for key, rows in slow.selected.items() if key[2] < PROMPT}
    for (_, _, at), rows in read.items():
        always = {*range(min(size, at + 1)), *range(at // size * size, at + 1)}
        assert always <= set(rows), "the first column and the own blocks"
    assert sum(map(len, read.values())) < sum(at + 1 for _, _, at in read) or history > PROMPT - 4


def test_rows_as_int8() -> None:
    format = Int8().format()
    fast = turn(runtime(TIGHT), 41, format=format)
    book = turn(SlowLoop(TIGHT), 41, fast.given, format=format)  # type: ignore[attr-defined]
    torch.testing.assert_close(fast.logits, book.logits, atol=1e-3, rtol=1e-3)  # type: ignore[attr-defined]
    for token in TOKENS[PROMPT:90]:
        torch.testing.assert_close(fast.feed([token]), book.feed([token]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("rows", "history"), [(1, 41), (5, 0), (7, 41)])
def test_a_mask_in_pieces_is_the_mask(monkeypatch: pytest.MonkeyPatch, rows: int, history: int) -> None:
    whole = turn(runtime(TIGHT), history) if history else None
    given = whole.given if whole else None  # type: ignore[attr-defined]
    want = whole.logits if whole else started().logits  # type: ignore[attr-defined]
    monkeypatch.setattr(_lines, "ROWS", rows)
    got = turn(runtime(TIGHT), history, given) if whole else started()
    torch.testing.assert_close(got.logits, want, atol=2e-4, rtol=2e-4)  # type: ignore[attr-defined]


def started() -> Walk:
    one = Walk(tiny.model(), TOKENS[:PROMPT], attend=runtime(TIGHT))
    one.plain = one.phase
    one.logits = one.feed(TOKENS[:PROMPT])  # type: ignore[attr-defined]
    return one


class Held(Watched):
    """What share of the attention of the rows that are sampled the lines held, rows being anywhere."""

    def lines(self, read: Read) -> AttentionLines:
        size, lines = self.knobs.block, Looping.lines(self, read)
        some = sampled(read.q.shape[0], self.knobs.sample)
        mass = masses(read, some, size)
        seen = lines.of(read.q_positions[some] // size, torch.arange(mass.shape[2])[None])
        self.found[read.layer] = (float((mass * seen).sum((1, 2)).div(mass.sum((1, 2))).min()), float(seen.all()))
        return lines


@pytest.mark.parametrize("alpha", [0.5, 0.95])
def test_the_share_holds_in_sampled_rows(alpha: float) -> None:
    held = Held(LoopServe(alpha=alpha, budget=10, block=4, sample=9))
    turn(held, 41)
    assert set(held.found) == set(range(LAYERS))
    assert all(share >= alpha - 1e-5 for share, _ in held.found.values())
    assert alpha > 0.9 or not all(whole for _, whole in held.found.values())


@pytest.mark.parametrize("new", [3, 20])
def test_the_newest_rows_that_were_computed_vote(new: int) -> None:
    one = turn(runtime(TIGHT), PROMPT - new)
    assert state(one, 2)["at"].tolist() == list(range(PROMPT - min(new, TIGHT.voters), PROMPT))
    for token in TOKENS[PROMPT:78]:
        one.feed([token])
    assert state(one, 2)["at"].tolist() == list(range(78 - 6, 78)) and state(one, 2)["border"] == 76


# ---- turns
def said(first: Request, new: Sequence[int] = OTHER[:30]) -> list[int]:
    return [*first.tokens, *new]


@pytest.mark.parametrize("store", ["slab", "int8"])
def test_with_all_lines_and_rows_a_turn_is_dense(store: str) -> None:
    mine, dense = built(ALL | {"store": store}), {"store": store}
    first = serve(mine, TEXT, tiny.greedy(N))
    assert [first.out] == tiny.plain([TEXT], tiny.greedy(N), dense)
    text = said(first)
    assert [serve(mine, text, after(first.id)).out] == tiny.plain([text], tiny.greedy(N), dense)


def test_without_a_name_all_is_as_before() -> None:
    text, alone = said(serve(built(VERBS), TEXT, tiny.greedy(N))), {"attend": VERBS["attend"]}
    engine = built(VERBS)
    before = engine.counters.rows
    assert [serve(engine, text, tiny.greedy(N)).out] == tiny.plain([text], tiny.greedy(N), alone)
    assert engine.counters.rows - before == len(text) + N - 1 and not engine.counters.prefix_hits
    gone = serve(engine, text, after("never heard of"))
    assert [gone.out] == tiny.plain([text], tiny.greedy(N), alone) and gone.recalled == 0


def test_three_turns_compute_what_is_new() -> None:
    engine = built(VERBS)
    last = serve(engine, TEXT, tiny.greedy(N))
    for turn_ in range(2):
        new = OTHER[20 * turn_ : 20 * turn_ + 20]
        before = engine.counters.rows
        now = serve(engine, said(last, new), after(last.id))
        assert engine.counters.rows - before == len(new) + 1 + N - 1, "the last token it gave has no row"
        assert now.recalled == len(last.tokens) - 1
        last = now
    plain = tiny.plain([last.prompt], tiny.greedy(N))
    assert [last.out] != plain, "it bites"


def test_what_a_turn_leaves_is_never_a_prefix_and_says_what_it_is() -> None:
    """A prompt that was computed whole leaves true rows, and goes on as true; rows over those of another request are
    none, though no token was decoded after them."""
    engine, text = built(VERBS), [*TEXT, *OTHER]
    assert engine.store.tree is None
    first = serve(engine, TEXT, tiny.greedy(1))
    second = serve(engine, text, after(first.id, 1))
    left = [engine.store.left(each.id) for each in (first, second)]
    assert [one is not None and one.kv.approximate for one in left] == [False, True]
    alone = serve(built(VERBS), text, tiny.greedy(N))
    before = engine.counters.rows
    assert serve(engine, text, tiny.greedy(N)).out == alone.out
    assert engine.counters.rows - before == len(text) + N - 1 and not engine.counters.prefix_hits


@dataclass(frozen=True)
class Noting(LoopServe):
    """LoopServe that notes for which rows lines are found in the first layer."""

    slices: list[tuple[int, int]] = field(default_factory=list, hash=False)

    def bind(self, host: Host) -> Looping:
        return _Noting(self, host.model.config)


class _Noting(Looping):
    def lines(self, read: Read) -> AttentionLines:
        assert isinstance(self.knobs, Noting)
        if read.layer == 0:
            self.knobs.slices.append((read.span.positions[0], read.span.positions[-1] + 1))
        return super().lines(read)


@pytest.mark.parametrize("schedule", ["sarathi:budget=3", "layered:rows_per_group=8"])
def test_each_run_of_new_tokens_is_one_piece_with_lines_of_its_own(schedule: str) -> None:
    now = edited(TEXT, EDITS["several"])
    noting = Noting(**vars(TIGHT))
    methods = parse({"decode": VERBS["decode"], "schedule": schedule}) | {"attend": noting}
    engine = Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()
    first = serve(engine, TEXT, tiny.greedy(1))
    second = serve(engine, now, after(first.id, 1))
    # 7 tokens in the place of 2; 7 that are gone; 3 more: (10, 17), nothing, (68, 71), and the last one again
    runs = [(0, 90), (10, 17), (68, 71), (len(now) - 1, len(now))]
    long = [(a, b) for a, b in runs if TIGHT.chooses(b)]
    assert noting.slices == long and second.recalled == len(now) - fresh(EDITS["several"]) - 1


def disturbed(engine: Engine, versions: Sequence[tuple[list[int], list[int]]]) -> list[list[int]]:
    """The answers to texts' new versions beside each other and a stranger, each preempted once on the way."""
    names = [serve(engine, text, tiny.greedy(1)).id for text, _ in versions]
    requests = [Request(now, after(name)) for (_, now), name in zip(versions, names)]
    engine.add(mate := Request(OTHER, tiny.greedy(N)))
    tiny.disturb(engine, requests)
    while any(request.left is None for request in (*requests, mate)):
        engine.step()
    assert engine.counters.preemptions == 2 and all(request.recalled for request in requests)
    return tiny.outs(requests)


@pytest.mark.parametrize(("edit", "more"), [
    ("append", {"store": "int8", "schedule": "sarathi:budget=3"}), ("replace", {"draft": "prompt_lookup"}),
])  # fmt: skip
def test_mates_and_preemption(edit: str, more: dict[str, str]) -> None:
    """The same tokens whoever is there, and after a preemption."""
    texts = tiny.prompts(90, 90, seed=2)
    versions = [(text, edited(text, EDITS[edit])) for text in texts]
    shaping = {verb: text for verb, text in more.items() if verb not in ("schedule", "draft")}
    alone = []
    for text, now in versions:
        engine = built(VERBS | shaping)
        first = serve(engine, text, tiny.greedy(1))
        alone.append(serve(engine, now, after(first.id)).out)
    assert disturbed(built(VERBS | more), versions) == alone


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
@pytest.mark.parametrize("store", ["slab", "int8"])
def test_in_bfloat16_decoded_rows_are_native_and_mates_change_nothing(
    monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    from tests.watched import passes

    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    outs, now = [], edited(TEXT, EDITS["append"])
    for others in ([], tiny.prompts(33, 50)):
        engine = tiny.engine(VERBS | {"store": store}, of=model)
        first = serve(engine, TEXT, tiny.greedy(1))
        made = passes(monkeypatch)
        requests = [Request(now, after(first.id)), *(Request(prompt, tiny.greedy(N)) for prompt in others)]
        for request in requests:
            engine.add(request)
        tiny.finish(engine, requests)
        assert requests[0].recalled == len(TEXT) and sum(each.whole for each in made) >= N // 2
        outs.append(requests[0].out)
    assert outs[0] == outs[1]


def test_siblings_and_another_worker() -> None:
    engine = built(VERBS)
    first = serve(engine, TEXT, tiny.greedy(1))
    one = Request(edited(TEXT, EDITS["append"]), after(first.id))
    family = [one, one.sibling(1)]
    for request in family:
        engine.add(request)
    tiny.finish(engine, family)
    assert family[0].out == family[1].out
    placed = tiny.engine(VERBS | {"place": "disaggregated"})
    gone = serve(placed, TEXT, tiny.greedy(1))
    assert serve(placed, one.prompt, after(gone.id)).out == one.out


def test_what_is_kept_is_booked_and_given_back() -> None:
    engine = built(VERBS)
    first = serve(engine, TEXT, tiny.greedy(N))
    request = Request(said(first), after(first.id))
    engine.add(request)
    while not request.n_out:
        engine.step()
    for _ in range(8):
        engine.step()
    layers = [own for layer, own in request.state[NAME].items() if layer >= 0]
    kept = sum(own[each].nbytes for own in layers for each in ("q", "at", "chosen"))
    assert len(layers) == LAYERS and request.kv is not None and request.kv.drawn >= kept
    assert engine.kv_bytes == engine.prefixes.retained.bytes + request.kv.bytes + request.kv.beside
    tiny.finish(engine, [request])


# ---- who may not
def test_whoever_has_to_see_prompts_is_refused_as_before() -> None:
    every = {name: catalog.build("attend", name).traits for name in catalog.names("attend")}
    recalling = [name for name, traits in every.items() if traits.accepts_injected]
    assert recalling == ["loopserve"]
    refused = {"attend": ["infllm", "power:weights=random:0", "zero_tuning:gamma=20,weights=none"], "skip": ["lazyllm"]}
    refused["evict"] = [name for name in catalog.names("evict") if name not in ("none", "longgen", "rlkv")]
    refused["evict"] += ["longgen:weights=none", "rlkv:weights=random:0"]
    for verb, names in refused.items():
        for name in names:
            with pytest.raises(UserError, match=f"decode pie takes rows .*{name.partition(':')[0]} is not shown them"):
                tiny.engine({"decode": "pie", verb: name})
            if verb == "evict" and name != "zipvl":
                with pytest.raises(UserError, match="is not shown them"):
                    tiny.engine(VERBS | {verb: name})
