"""decode.pie: rows that stay, rows that move, and the few that are computed, against lists of keys kept by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.methods.decode._common import common
from phasewise.methods.decode.pie import Pie, ReusedPiece, pieces
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.host import Host
from tests import oracle, seeds, tiny
from tests.kv.harness import sliding
from tests.skip.test_unified import ByHand

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
VERBS = {"decode": "pie:least=4"}
TEXT = tiny.prompts(90)[0]
OTHER = tiny.prompts(60, seed=5)[0]
N = 12
Edit = tuple[int, int, list[int]]  # what stands in the place of tokens i .. j-1
EDITS: dict[str, list[Edit]] = {
    "replace": [(30, 36, OTHER[:9])],
    "insert": [(30, 30, OTHER[:5])],
    "delete": [(30, 37, [])],
    "append": [(90, 90, OTHER[:8])],
    "several": [(10, 12, OTHER[:7]), (40, 47, []), (70, 70, OTHER[7:10])],
}


def edited(text: Sequence[int], edits: Sequence[Edit]) -> list[int]:
    out, last = list[int](), 0
    for i, j, new in edits:
        out += [*text[last:i], *new]
        last = j
    return out + list(text[last:])


def fresh(edits: Sequence[Edit]) -> int:
    return sum(len(new) for _, _, new in edits)


def serve(engine: Any, prompt: Sequence[int], params: Params) -> Request:
    request = Request(prompt, params)
    engine.add(request)
    while request.left is None:
        engine.step()
    assert request.left.how == "finished"
    return request


def after(name: str, n: int = N) -> Params:
    return replace(tiny.greedy(n), ask={"after": name})


def pair(engine: Any, edits: Sequence[Edit], n: int = N, text: Sequence[int] = TEXT) -> Request:
    """A text is met, and then its edited version."""
    first = serve(engine, text, tiny.greedy(1))
    return serve(engine, edited(text, edits), after(first.id, n))


# ---- by hand
class Slow(ByHand):
    """Lists of keys and values per layer, one row at a time; keys are turned by hand."""

    def edit(self, edits: Sequence[Edit], text: Sequence[int]) -> list[int]:
        """From the rows of a text to those of the edited one, but for its last. -> the edited text"""
        old, self.rows = self.rows, {}
        out, last = list[int](), 0
        for i, j, new in [*edits, (len(text), len(text), [])]:
            kept = list(range(last, i))
            if (i, j) == (len(text), len(text)) and not new and kept:
                kept = kept[:-1]
            for layer, rows in old.items():
                shift = len(out) - last
                moved = [(self.model.rotate(layer, rows[at][0][:, None], shift)[:, 0], rows[at][1]) for at in kept]
                self.rows.setdefault(layer, []).extend(moved)
            out += text[last:i]
            for token in new[: len(new) - (i == len(text))]:
                self.run(token, len(out), range(self.model.config.layers))
                out.append(token)
            out += new[len(new) - (i == len(text)) :] if new else []
            last = j
        return out

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = self.model.config.attention[layer].window
        rows = self.rows.setdefault(layer, [])
        hidden = [] if window is None else rows[: max(0, len(rows) + 1 - window)]
        self.rows[layer] = rows[len(hidden) :]
        out = super().attend(layer, q, k, v)
        self.rows[layer] = hidden + self.rows[layer]
        return out

    def say(self, token: int, position: int, n: int) -> list[int]:
        out = list[int]()
        for i in range(n):
            token = self.run(token, position + i, range(self.model.config.layers))
            out.append(token)
        return out


@torch.inference_mode()
def by_hand(model: Model, edits: Sequence[Edit], text: Sequence[int] = TEXT, n: int = N) -> list[int]:
    slow = Slow(model)
    for at, token in enumerate(text):
        slow.run(token, at, range(model.config.layers))
    now = slow.edit(edits, text)
    assert now == edited(text, edits)
    return slow.say(now[-1], len(now) - 1, n)


MODELS = [tiny.model(), tiny.model(layers=6, seed=3), sliding(24, 3)]


@pytest.mark.parametrize(("model", "name"), seeds.params(product(MODELS, EDITS), 3, "pie by hand"))
def test_tokens_are_those_of_rows_kept_by_hand(model: Model, name: str) -> None:
    engine = tiny.engine(VERBS, of=model)
    assert pair(engine, EDITS[name]).out == by_hand(model, EDITS[name])


def rows_of(engine: Engine, prompt: Sequence[int], params: Params) -> tuple[list[tuple[Tensor, Tensor]], Request]:
    """Keys and values of all layers once the first token is there."""
    request = Request(prompt, params)
    engine.add(request)
    while not request.n_out:
        engine.step()
    assert request.kv is not None
    parts = [layer.read()[0] for layer in request.kv.layers]
    assert all(part.plain for part in parts), "positions are slots, as in any KV"
    found = [(part.k.clone(), part.v.clone()) for part in parts]
    engine.cancel(request)
    return found, request


def built(verbs: dict[str, str], of: Model | None = None, **limits: Any) -> Engine:
    engine = tiny.engine(verbs, of=of, **limits)
    assert isinstance(engine, Engine)
    return engine


# ---- what the card says
@pytest.mark.parametrize("name", EDITS)
def test_one_layer_is_exact_and_of_more_only_the_first(name: str) -> None:
    """And rows before the edit, and the first edit's own, are exact in all."""
    now = edited(TEXT, EDITS[name])
    for layers in (1, 4):
        model = tiny.model(layers=layers)
        engine = built(VERBS, model)
        first = serve(engine, TEXT, tiny.greedy(1))
        mine, _ = rows_of(engine, now, after(first.id))
        true, _ = rows_of(built({}, model), now, tiny.greedy(N))
        i, _, new = EDITS[name][0]
        behind = i + len(new)
        for layer, ((k, v), (want_k, want_v)) in enumerate(zip(mine, true)):
            upto = None if layer == 0 else behind
            torch.testing.assert_close(k[:, :upto], want_k[:, :upto], **CLOSE)
            torch.testing.assert_close(v[:, :upto], want_v[:, :upto], **CLOSE)
            if layer and behind < len(now) - 1:
                assert (v[:, behind:-1] - want_v[:, behind:-1]).abs().max() > 1e-2, "it has not read the edit"
        if layers == 1:
            assert (
                pair(engine, EDITS[name]).out
                == tiny.outs(tiny.run(tiny.engine({}, of=model), [now], tiny.greedy(N)))[0]
            )


@pytest.mark.parametrize("length", [60, 200, 600])
@pytest.mark.parametrize("repair", [0, 3])
def test_rows_are_the_new_ones_and_one_whatever_follows(length: int, repair: int) -> None:
    text, edits = tiny.prompts(length)[0], [(20, 24, OTHER[:7])]
    engine = built({"decode": f"pie:least=4,repair={repair}"}, prefix_cache=False)
    first = serve(engine, text, tiny.greedy(1))
    before = engine.counters.rows
    request = serve(engine, edited(text, edits), after(first.id, 1))
    assert engine.counters.rows - before == 7 + 1 + repair
    assert engine.counters.recalled == request.recalled == length - 4 - 1 - repair


def test_several_edits_cost_their_sum_and_deletions_one_row() -> None:
    for name, edits in EDITS.items():
        engine = built(VERBS, prefix_cache=False)
        first = serve(engine, TEXT, tiny.greedy(1))
        before = engine.counters.rows
        request = serve(engine, edited(TEXT, edits), after(first.id, 1))
        assert engine.counters.rows - before == fresh(edits) + (name != "append"), name
        assert request.recalled == request.prompt_len - fresh(edits) - (name != "append")


def test_deleting_and_inserting_the_same_gives_the_keys_back() -> None:
    engine = built(VERBS, prefix_cache=False)
    first = serve(engine, TEXT, tiny.greedy(1))
    want, _ = rows_of(built({}), TEXT, tiny.greedy(2))
    second = serve(engine, edited(TEXT, [(30, 41, [])]), after(first.id, 1))
    assert second.recalled == 90 - 11 - 1
    mine, third = rows_of(engine, TEXT, after(second.id, 2))
    assert third.recalled == 78, "of 79 rows that were left the last is computed again"
    for (k, v), (want_k, want_v) in zip(mine, want):
        torch.testing.assert_close(k[:, :-1], want_k[:, :-1], **CLOSE)
        torch.testing.assert_close(v[:, :-1], want_v[:, :-1], **CLOSE)


def test_enough_repair_is_dense() -> None:
    now = edited(TEXT, EDITS["replace"])
    assert (
        pair(tiny.engine({"decode": "pie:least=4,repair=90"}), EDITS["replace"]).out
        == tiny.plain([now], tiny.greedy(N))[0]
    )
    outs = {c: pair(tiny.engine({"decode": f"pie:least=4,repair={c}"}), EDITS["replace"], 40).out for c in (0, 20)}
    assert outs[0] != outs[20]


def test_going_on_is_a_fresh_request_of_the_same_text() -> None:
    """A conversation: all that was said, answers included, and more. Its rows are true, and may be shared."""
    engine = built(VERBS)
    first = serve(engine, TEXT, tiny.greedy(N))
    said = first.tokens + OTHER[:20]
    before = engine.counters.rows
    second = serve(engine, said, after(first.id))
    assert engine.counters.rows - before == 20 + 1 + N - 1, "the last token it gave has no row"
    assert engine.counters.prefix_hits == 64 and second.recalled == 90 + N - 1 - 64, "the prompt's blocks come first"
    assert [second.out] == tiny.plain([said], tiny.greedy(N))
    hits = engine.counters.prefix_hits
    serve(engine, said, tiny.greedy(1))
    assert engine.counters.prefix_hits - hits == len(said) // 32 * 32


def test_pieces() -> None:
    old = list(range(100, 140))
    assert pieces(old, old, 1, 0) == [ReusedPiece(0, 39, 0, False)]
    assert pieces(old, [*old[:10], 1, 2, *old[15:]], 1, 0) == [
        ReusedPiece(0, 10, 0, False),
        ReusedPiece(12, 36, -3, True),
    ]
    assert pieces(old, [*old[:10], 1, 2, *old[15:]], 1, 5) == [
        ReusedPiece(0, 10, 0, False),
        ReusedPiece(17, 36, -3, True),
    ]
    assert pieces(old, [*old[:10], 1, *old[10:14], 2, *old[14:]], 5, 0) == [
        ReusedPiece(0, 10, 0, False),
        ReusedPiece(16, 41, 2, True),
    ]
    assert pieces(old, [7, *old], 1, 0) == [ReusedPiece(1, 40, 1, True)]
    assert pieces(old, [1, 2, 3], 1, 0) == [] == pieces(old, old[:1], 1, 0)
    assert pieces([5] * 20, [5] * 30, 4, 0) == [ReusedPiece(0, 20, 0, False)]


@pytest.mark.parametrize("least", [1, 4, 16, 40])
def test_runs_are_those_of_a_slow_search(least: int) -> None:
    """In texts that do not repeat themselves; and always they are common, in order and apart."""
    random = Random(least)
    for case in range(60):
        words = 10_000 if case % 2 else 12
        old = [random.randrange(words) for _ in range(300)]
        new = list(old)
        for _ in range(random.randrange(6)):
            at = random.randrange(len(new))
            new[at : at + random.randrange(30)] = [random.randrange(words) for _ in range(random.randrange(30))]
        found = common(old, new, least)
        at = to = 0
        for a, b, size in found:
            assert at <= a and to <= b and size >= least and old[a : a + size] == new[b : b + size]
            at, to = a + size, b + size
        if words > 12:
            slow = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
            assert sum(size for *_, size in found) >= sum(size for *_, size in slow if size >= least) - 3


@pytest.mark.parametrize("kind", ["one token", "two in turn", "every other one is new", "turned round"])
def test_hostile_texts_take_no_time(kind: str) -> None:
    """Where time grew with the square of a text, this would not end; and what is found is there."""
    n = 60_000
    old, new = {
        "one token": ([5] * n, [6, *[5] * n, 7]),
        "two in turn": ([5, 6] * n, [1, *[6, 5] * n, 2]),
        "every other one is new": (list(range(n)), [i if i % 2 else n + i for i in range(n)]),
        "turned round": (list(range(n)), list(range(n))[::-1]),
    }[kind]
    for least in (1, 16):
        found = pieces(old, new, least, 0)
        for piece in found:
            start, stop, moved, _ = piece
            assert new[start:stop] == old[start - moved : stop - moved] and start < stop
        if kind in ("one token", "two in turn"):  # all but the edits, and the last token
            assert sum(piece.stop - piece.start for piece in found) == len(old) - (kind == "two in turn")


# ---- memory
def test_what_is_left_lies_in_the_ledger_and_the_least_recently_used_goes_first() -> None:
    row = built({}).store.row_bytes
    engine = built(VERBS, kv_bytes=128 * 4 * row, prefix_cache=False)
    texts = tiny.prompts(90, 80, 70, seed=9)
    names = [serve(engine, text, tiny.greedy(1)).id for text in texts]
    assert engine.kv_bytes == engine.prefixes.retained.bytes > 0
    assert engine.store.left(names[0]) is not None, "used again"
    serve(engine, tiny.prompts(200, seed=11)[0], tiny.greedy(1))
    assert [engine.store.left(name) is not None for name in names] == [True, False, True]
    assert engine.kv_bytes <= 128 * 4 * row
    engine.forget_prefixes()
    assert engine.kv_bytes == 0 and engine.store.left(names[0]) is None


def test_kv_that_is_gone_is_computed_and_the_answer_says_so() -> None:
    now = edited(TEXT, EDITS["replace"])
    engine = built(VERBS)
    first = serve(engine, TEXT, tiny.greedy(1))
    engine.prefixes.retained.clear()
    request = serve(engine, now, after(first.id))
    assert request.recalled == 0 and [request.out] == tiny.plain([now], tiny.greedy(N))
    assert serve(engine, now, after("never heard of")).recalled == 0


def test_kv_that_goes_while_it_is_taken_stays_for_whoever_takes_it() -> None:
    want = by_hand(tiny.model(), EDITS["several"])
    engine = built(VERBS | {"schedule": "sarathi:budget=3"})
    first = serve(engine, TEXT, tiny.greedy(1))
    request = Request(edited(TEXT, EDITS["several"]), after(first.id))
    engine.add(request)
    engine.step()
    engine.prefixes.retained.clear()
    tiny.finish(engine, [request])
    assert request.out == want and request.recalled > 0


def test_rows_that_moved_are_never_a_prefix_of_others() -> None:
    now = edited(TEXT, EDITS["insert"])
    engine = built(VERBS)
    pair(engine, EDITS["insert"])
    hits = engine.counters.prefix_hits
    assert [serve(engine, now, tiny.greedy(N)).out] == tiny.plain([now], tiny.greedy(N))
    assert engine.counters.prefix_hits - hits <= 30 // 32 * 32, "what stands before the edit"


@pytest.mark.parametrize(("more", "shares"), [
    ({}, True), ({"attend": "hydragen"}, True), ({"store": "int8"}, True),
    ({"attend": "quest:page=4,budget=16,dense_layers=0"}, False),
    ({"attend": "double_sparsity:k=8,weights=random:0"}, False),
    ({"store": "kivi:bits=4,group=4,residual=8"}, False), ({"store": "gear:bits=4,group=4,block=8"}, False),
], ids=str)  # fmt: skip
def test_answers_that_were_decoded_otherwise_are_never_a_prefix_of_others(more: dict[str, str], shares: bool) -> None:
    """Rows of a long answer that read a few of the others, or that were rounded, help who asks for them alone."""
    other, mine = built(VERBS | more), built(VERBS | more)
    first = serve(mine, TEXT, tiny.greedy(60))
    text = [*TEXT, *first.out, *OTHER]
    alone = serve(other, TEXT, tiny.greedy(1)) and serve(other, text, tiny.greedy(N))
    before = mine.counters.rows
    serve(mine, text, after(first.id, 1))
    assert mine.counters.rows - before < len(OTHER) + 8, "the answer's rows are taken"
    before = mine.counters.rows
    assert serve(mine, text, tiny.greedy(N)).out == alone.out
    assert (mine.counters.rows - before < 60 + N) == shares


def test_other_recipes_and_stores_find_nothing() -> None:
    from tests.laws import mixed

    placed = mixed.build({"small": {"store": "int8"}}, VERBS)
    first = serve(placed, TEXT, tiny.greedy(1))
    request = Request(TEXT, after(first.id), recipe="small")
    placed.add(request)
    tiny.finish(placed, [request])
    assert request.recalled == 0


@pytest.mark.parametrize("leave", ["cancelled", "failed"])
def test_only_requests_that_finish_leave_something(leave: str) -> None:
    engine = built(VERBS)
    request = Request(TEXT, tiny.greedy(N))
    engine.add(request)
    engine.step()
    if leave == "cancelled":
        engine.cancel(request)
    else:
        engine._fail(request, RuntimeError("no"))
    assert engine.store.left(request.id) is None


def test_other_methods_leave_nothing() -> None:
    engine = built({})
    serve(engine, TEXT, tiny.greedy(2))
    engine.forget_prefixes()
    assert engine.kv_bytes == 0 == engine.prefixes.retained.bytes


def test_an_edit_that_is_dropped_leaves_nothing() -> None:
    engine = built(VERBS | {"schedule": "sarathi:budget=3"})
    first = serve(engine, TEXT, tiny.greedy(1))
    for steps in range(4):
        request = Request(edited(TEXT, EDITS["several"]), after(first.id))
        engine.add(request)
        for _ in range(steps):
            engine.step()
        engine.cancel(request)
    engine.forget_prefixes()
    assert engine.kv_bytes == 0


# ---- whoever else is there
def disturbed(engine: Engine, versions: Sequence[tuple[list[int], list[int]]]) -> list[list[int]]:
    """What texts' new versions are answered beside each other and a stranger, each preempted once on the way."""
    names = [serve(engine, text, tiny.greedy(1)).id for text, _ in versions]
    requests = [Request(now, after(name)) for (_, now), name in zip(versions, names)]
    engine.add(mate := Request(OTHER, tiny.greedy(N)))
    tiny.disturb(engine, requests)
    while any(request.left is None for request in (*requests, mate)):
        engine.step()
    assert engine.counters.preemptions == 2 and all(request.recalled for request in requests)
    return tiny.outs(requests)


@pytest.mark.parametrize("more", [{"store": "int8"}, {"attend": "hydragen", "schedule": "sarathi:budget=3"}], ids=str)
def test_chunks_mates_and_preemption(more: dict[str, str]) -> None:
    """The same tokens whoever is there, in whatever pieces, and after a preemption."""
    texts = tiny.prompts(90, 70, seed=2)
    versions = [(text, edited(text, EDITS["replace"])) for text in texts]
    alone = []
    for text, now in versions:
        engine = built(VERBS | {"schedule": "prefill_first"} | {k: v for k, v in more.items() if k != "schedule"})
        first = serve(engine, text, tiny.greedy(1))
        alone.append(serve(engine, now, after(first.id)).out)
    assert disturbed(built(VERBS | more), versions) == alone


def test_siblings() -> None:
    sampled = Params(max_tokens=N, ignore_eos=True, temperature=0.8, seed=3)
    now = edited(TEXT, EDITS["replace"])

    def family(engine: Engine, count: int) -> list[Request]:
        first = serve(engine, TEXT, tiny.greedy(1))
        one = Request(now, replace(sampled, ask={"after": first.id}))
        every = [one, *(one.sibling(i) for i in range(1, count))]
        for request in every:
            engine.add(request)
        tiny.finish(engine, every)
        return every

    for request in family(built(VERBS), 3):
        engine = built(VERBS)
        first = serve(engine, TEXT, tiny.greedy(1))
        alone = serve(engine, now, replace(request.params, ask={"after": first.id}))
        assert request.out == alone.out


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
def test_in_bfloat16_all_steps_are_native_and_mates_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.watched import passes

    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    outs, now = [], edited(TEXT, EDITS["replace"])
    for others in ([], tiny.prompts(33, 50)):
        engine = tiny.engine(VERBS, of=model)
        first = serve(engine, TEXT, tiny.greedy(1))
        made = passes(monkeypatch)
        requests = [Request(now, after(first.id)), *(Request(prompt, tiny.greedy(N)) for prompt in others)]
        for request in requests:
            engine.add(request)
        tiny.finish(engine, requests)
        outs.append(requests[0].out)
        assert made and all(each.whole for each in made)
    assert outs[0] == outs[1]


def test_with_hand_off_a_request_starts_where_the_kv_is() -> None:
    placed = tiny.engine(VERBS | {"place": "disaggregated"})
    here = pair(placed, EDITS["replace"])  # one token: it never left
    assert here.recalled == 90 - 6 - 1 and here.out == by_hand(tiny.model(), EDITS["replace"])
    assert placed.counters.handoffs == 1
    gone = serve(placed, tiny.prompts(80, seed=8)[0], tiny.greedy(4))
    now = edited(gone.prompt, EDITS["insert"])
    handoffs = placed.counters.handoffs
    request = serve(placed, now, after(gone.id))
    assert request.recalled == 80 - 1 and request.out == by_hand(tiny.model(), EDITS["insert"], gone.prompt)
    assert placed.counters.handoffs == handoffs, "a worker that also decodes keeps it"
    unknown = serve(placed, now, after("never heard of"))
    assert unknown.recalled == 0 and [unknown.out] == tiny.plain([now], tiny.greedy(N))


def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    placed = tiny.engine(VERBS | {"place": "disaggregated"})
    gone = serve(placed, TEXT, tiny.greedy(4))
    keeper = placed._affinity._at[gone.id]
    placed._lose(keeper, "on purpose")
    now = edited(TEXT, EDITS["insert"])
    request = serve(placed, now, after(gone.id))
    assert request.recalled == 0 and [request.out] == tiny.plain([now], tiny.greedy(N))


def test_where_nobody_can_go_on_nothing_is_remembered() -> None:
    placed = tiny.engine({"place": "disaggregated"})
    serve(placed, TEXT, tiny.greedy(4))
    assert not placed._affinity._at


def test_from_python() -> None:
    llm = LLM("pocket", decode="pie")
    text = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return "
    (first,) = llm.generate(text, max_tokens=4)
    assert first.id and not first.recalled
    (second,) = llm.generate(text.replace("area", "surface"), max_tokens=4, after=first.id)
    assert second.recalled > 0 and second.id != first.id
    llm.close()


# ---- what is refused
@pytest.mark.parametrize(("knobs", "says"), [
    ({"repair": -1}, "repair=-1 must be at least 0, a number of tokens"),
    ({"least": 0}, "least=0 must be at least 1, a number of tokens"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_bound(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"pie: {says}"):
        Pie(**knobs)


def test_ropes_that_depend_on_the_length_are_refused_by_name() -> None:
    class Long:
        scheme, fixed = "dynamic", False

    class Model:
        config = type("Config", (), {"ropes": (Long(),)})

    with pytest.raises(
        UserError, match="pie: .* rope scaling 'dynamic' depends on the length .*choose another decode method"
    ):
        Pie().bind(Host(Model(), None, None, None, None))  # type: ignore[arg-type]


@pytest.mark.parametrize(("more", "said"), [
    ({"evict": "snapkv"}, "decode pie takes rows of prompts from elsewhere, and evict snapkv is not shown them"),
    ({"skip": "lazyllm"}, "decode pie takes rows of prompts from elsewhere, and skip lazyllm is not shown them"),
    ({"store": "zipcache"}, "and store zipcache is not shown them: leave one of them out"),
    ({"store": "cachegen:rest=zipcache"}, "and store cachegen:rest=zipcache is not shown them: leave one of them out"),
])  # fmt: skip
def test_who_has_to_see_prompts_is_refused_by_name(more: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny.engine(VERBS | more)


def test_bad_asks_are_named() -> None:
    engine = tiny.engine(VERBS)
    with pytest.raises(UserError, match="after=7 must be the id of an earlier request, a text"):
        engine.add(Request(TEXT, Params(ask={"after": 7})))
    with pytest.raises(UserError, match="no method of this engine takes after"):
        tiny.engine({}).add(Request(TEXT, Params(ask={"after": "r1"})))


def test_the_oracle_is_dense_where_nothing_moves() -> None:
    assert by_hand(tiny.model(), []) == oracle.greedy(tiny.checkpoint(), TEXT, N)[0]
