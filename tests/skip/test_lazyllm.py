"""skip.lazyllm: whom the last token does not look at waits, comes back as it left, and runs no layer twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.kv.beside import Wants
from phasewise.kv.cache import KV
from phasewise.kv.format import Raw, entry_bytes
from phasewise.kv.layer_kv import LayerKV
from phasewise.methods.skip.lazyllm import NAME, Lazy, LazyLLM, going
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.read import Read
from phasewise.verbs.host import Host
from tests import double, oracle, seeds, tiny
from tests.kv.harness import Walk, drafting, mixed, sliding
from tests.skip.test_unified import ByHand

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
KNOBS: dict[str, Any] = {"keep": 0.3, "start": 0.25, "stages": 3}
SKIP = "lazyllm:keep=0.3"
VERBS = {"skip": SKIP}
N = 14


def lazy(model: Model | None = None, **knobs: Any) -> Lazy:
    return LazyLLM(**(KNOBS | knobs)).bind(Host(model or tiny.model(), None, None, None, None))  # type: ignore[arg-type]


def over(model: Model, prompt: Sequence[int], runtime: Lazy | None = None, **more: Any) -> Walk:
    """A request that is fed by hand, its prompt pruned as well."""
    runtime = runtime or lazy(model)
    one = Walk(model, prompt, evict=runtime, attend=runtime, skip=runtime, **more)
    one.plain = one.phase
    one.kv.level = True
    one.kv.changed()
    return one


# ---- a slow twin
class Slow:
    """The method in Python: a set of tokens per layer, a dictionary of those that wait, one token at a time."""

    def __init__(self, model: Model, knobs: LazyLLM) -> None:
        self.model, self.knobs = model, knobs
        self.held = [dict[int, tuple[Tensor, Tensor]]() for _ in range(model.config.layers)]  # by position
        self.waits = [dict[int, Tensor]() for _ in range(model.config.layers)]
        self.pairs: list[tuple[int, int]] = []  # (layer, position), as they were run
        self.n = 0

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """The prompt, or one token. -> the last one's logits [V]."""
        start, self.n = self.n, self.n + len(tokens)
        x = {start + i: self.model.embed(torch.tensor([token])) for i, token in enumerate(tokens)}
        shares, prompt = self.knobs.shares(self.model.config.layers), start == 0
        for layer in range(self.model.config.layers):
            for at in sorted(x):
                self._store(layer, at, x[at])
            out = {at: self._run(layer, at, x[at]) for at in sorted(x)}
            x = {at: each for at, (each, _) in out.items()}
            if layer not in shares or not (prompt or self.knobs.revive):
                continue
            weights = out[self.n - 1][1]  # by position, of all that the layer holds
            order = sorted(self.held[layer], key=lambda at: (at != self.n - 1, -weights[at], at))
            needed = set(order[: going(shares[layer], self.n)])
            for at in [at for at in x if at not in needed]:
                self.waits[layer][at] = x.pop(at)
            if not prompt:
                for at in [at for at in self.waits[layer] if at in needed]:
                    x[at] = self.waits[layer].pop(at)
        return self.model.head(x[self.n - 1])[0]

    def _context(self, at: int) -> ByHand:
        context = ByHand(self.model)
        context.rotary = self.model.rotary(torch.tensor([at]))
        return context

    def _store(self, layer: int, at: int, x: Tensor) -> None:
        """What it leaves in a layer: keys and values do not depend on what is read."""
        context = self._context(at)
        self.model.layer(layer, x, context)  # type: ignore[arg-type]
        assert at not in self.held[layer], "a pair would run twice"
        self.pairs.append((layer, at))
        self.held[layer][at] = context.rows[layer][0]

    def _run(self, layer: int, at: int, x: Tensor) -> tuple[Tensor, dict[int, float]]:
        """Through a layer, reading all that it holds up to its position. -> and the mean of its weights"""
        window = self.model.config.attention[layer].window
        seen = [p for p in sorted(self.held[layer]) if p <= at and (window is None or at - p < window)]
        weights = dict.fromkeys(self.held[layer], 0.0)
        held, scale = self.held[layer], self.model.config.attention[layer].scale

        class Reading(ByHand):
            def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
                for head in range(q.shape[1]):
                    keys, values = (torch.stack([held[p][side][head // group] for p in seen]) for side in (0, 1))
                    each = (keys @ q[0, head] * scale).softmax(0)
                    out[0, head] = each @ values
                    for p, weight in zip(seen, each.tolist()):
                        weights[p] += weight / q.shape[1]
                return out

        context = Reading(self.model)
        context.rotary = self.model.rotary(torch.tensor([at]))
        return self.model.layer(layer, x, context), weights  # type: ignore[arg-type]


MODELS = [tiny.model(layers=6), sliding(24, 4), mixed(20)]


@pytest.mark.parametrize(
    ("model", "revive"), seeds.params(product(MODELS, [True, False]), 1, "lazyllm", always=[(MODELS[0], True)])
)
def test_equals_the_slow_twin(model: Model, revive: bool) -> None:
    """Sets of tokens, keys and values, who waits, and logits, at every step."""
    text = tiny.prompts(48)[0]
    runtime = lazy(model, revive=revive)
    one, slow = over(model, text[:38], runtime), Slow(model, runtime.knobs)
    came = 0
    for step, tokens in enumerate([text[:38], *([token] for token in text[38:])]):
        before = len(slow.pairs)
        torch.testing.assert_close(one.feed(tokens)[-1], slow.feed(tokens), **CLOSE)
        came += len(slow.pairs) - before - model.config.layers if step else 0
        waiting = one.request.state.get(NAME, {})
        for layer in range(model.config.layers):
            (part,) = one.kv.layers[layer].read()
            positions = part.positions[0].tolist()
            assert sorted(positions) == sorted(slow.held[layer])
            for slot, at in enumerate(positions):
                torch.testing.assert_close(part.k[:, slot], slow.held[layer][at][0], **CLOSE)
                torch.testing.assert_close(part.v[:, slot], slow.held[layer][at][1], **CLOSE)
            if revive:
                held = waiting.get(layer, [torch.empty(0), None])
                assert held[0].tolist() == sorted(slow.waits[layer])
                for row, at in enumerate(held[0].tolist()):
                    torch.testing.assert_close(held[1][row : row + 1], slow.waits[layer][at], **CLOSE)
        assert one.counters.row_layers == len(slow.pairs) == len(set(slow.pairs))
    assert (came > 0) is revive, "some came back, or none"
    assert revive or not one.request.state.get(NAME)


# ---- what the card says
def test_nothing_pruned_is_dense() -> None:
    model, text = tiny.model(), tiny.prompts(50)[0]
    assert tiny.engine({"skip": "lazyllm:keep=1.0"}).recipes[""].phases[0].skip is None, "and asks nobody"  # type: ignore[attr-defined]
    one = over(model, text[:40], Lazy(LazyLLM(keep=1.0), model.config, model.dtype))
    got = torch.cat([one.feed(text[:40]), *(one.feed([token]) for token in text[40:])])
    torch.testing.assert_close(got, oracle.logits(tiny.checkpoint(), text), **CLOSE)
    assert one.counters.row_layers == 50 * 4


class All(Lazy):
    """A new token needs everything."""

    def best(self, read: Read, count: int) -> Tensor:
        prompt = read.span.request.prefilling
        return super().best(read, count) if prompt else torch.arange(read.part.size[1])


def one_site(model: Model, after: int = 2) -> All:
    """Tokens leave after one layer, and all of them come back with the next token."""
    made = All(LazyLLM(keep=0.4, stages=1), model.config, model.dtype)
    made.shares = {after - 1: 0.4}
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_come_back_have_the_dense_keys_and_values_in_the_next_layer(dtype: torch.dtype) -> None:
    """To the bit where rows do not depend on their mates; deeper they need not, and do not."""
    exact = dtype == torch.bfloat16 and native.library() is not None
    model = Model.load(tiny.checkpoint(hidden=64, layers=6), dtype=dtype)
    model.stack = None  # all on the open path
    text = tiny.prompts(61)[0]
    dense = Walk(model, text)
    dense.feed(text)
    one = over(model, text[:60], one_site(model))
    one.feed(text[:60])
    gone = set(range(60)) - set(one.positions(2))
    assert len(gone) == 60 - ceil(0.4 * 60)
    one.feed(text[60:])
    assert not one.request.state[NAME], "everybody is back"
    assert one.counters.row_layers == 61 * 6
    apart = []
    for layer in range(6):
        (mine,), (true,) = one.kv.layers[layer].read(), dense.kv.layers[layer].read()
        positions = mine.positions[0].tolist()
        assert sorted(positions) == list(range(61))
        back = [slot for slot, at in enumerate(positions) if at in gone]
        at = [positions[slot] for slot in back]
        pairs = [(mine.k[:, back], true.k[:, at]), (mine.v[:, back], true.v[:, at])]
        if layer <= 2 and exact:
            assert all(torch.equal(a, b) for a, b in pairs)
        elif layer <= 2:
            for a, b in pairs:
                torch.testing.assert_close(a, b, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=1e-4)
        apart.append(max(float((a - b).abs().max()) for a, b in pairs))
    assert min(apart[4:]) > 1e-2, "from there on they have read rows that had not read them"


def test_pairs_are_the_closed_form_never_more_than_dense_and_never_twice() -> None:
    model, text = tiny.model(layers=6), tiny.prompts(120)[0]
    runtime = lazy(model)
    one = over(model, text[:80], runtime)
    one.feed(text[:80])
    want, here = 0, 80
    for layer in range(6):
        want += here
        here = going(runtime.shares[layer], 80) if layer in runtime.shares else here
    assert one.counters.row_layers == want < 80 * 6, "fewer at the first token"
    for done, token in enumerate(text[80:], 81):
        before = sum(layer.n for layer in one.kv.layers)
        pairs = one.counters.row_layers
        one.feed([token])
        assert one.counters.row_layers - pairs == sum(layer.n for layer in one.kv.layers) - before >= 6
        assert one.counters.row_layers <= done * 6
        for layer in range(6):
            positions = one.positions(layer)
            assert len(positions) == len(set(positions)), "a pair twice"
            assert (positions[-1] == done - 1 and layer) or positions == list(range(done))
    assert one.counters.row_layers == sum(layer.n for layer in one.kv.layers)


def test_layers_and_shares() -> None:
    assert LazyLLM(keep=0.1).shares(8) == pytest.approx({1: 0.7, 3: 0.4, 5: 0.1})
    assert LazyLLM(keep=0.5, start=0.0, stages=1).shares(4) == {0: 0.5}
    assert LazyLLM(keep=0.5, start=0.9, stages=5).shares(4) == {2: 0.5}, "after the last layer nobody need leave"
    assert LazyLLM(keep=1.0).shares(8) == {} == LazyLLM().shares(1)
    for layers in range(2, 40):
        for knobs in (LazyLLM(), LazyLLM(stages=7), LazyLLM(start=0.0, keep=0.01)):
            shares = list(knobs.shares(layers).values())
            assert shares == sorted(shares, reverse=True) and shares[-1] == pytest.approx(knobs.keep)
            if len(shares) < knobs.stages:
                continue  # several fall together
            drops = [1 - b / a for a, b in zip([1.0, *shares], shares)]
            assert drops == sorted(drops), "mild early, strong late"


# ---- memory
def test_what_waits_is_booked() -> None:
    engine = tiny.engine(VERBS)
    assert isinstance(engine, Engine)
    request = Request(tiny.prompts(60)[0], tiny.greedy(20))
    engine.add(request)
    most = 0
    while request.left is None:
        engine.step()
        if request.kv is None:
            break
        tensors = [tensor for held in request.state[NAME].values() for tensor in held]
        waiting = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert waiting == request.kv.beside
        assert engine.kv_bytes == request.kv.bytes + request.kv.beside
        most = max(most, waiting)
    tokens = 60 - ceil(0.3 * 60)
    assert most == tokens * (48 * 4 + 8), "one row for each token that has not gone all the way"
    tiny.finish(engine, [request])


def test_a_layer_has_room_for_all_that_may_come_back() -> None:
    """Deep layers hold few rows for long, and then all at once."""
    model = tiny.model()
    runtime = All(LazyLLM(keep=0.1), model.config, model.dtype)
    text, late = tiny.prompts(200)[0], 130
    one = over(model, text[:60], runtime)
    one.feed(text[:60])
    runtime.best = lambda read, count: torch.tensor([read.part.size[1] - 1])  # type: ignore[method-assign]
    for token in text[60:late]:
        one.feed([token])
    assert one.kv.layers[-1].n < 80
    del runtime.best  # type: ignore[method-assign]
    one.feed([text[late]])
    assert [layer.n for layer in one.kv.layers] == [late + 1] * 4
    used = one.kv.bytes + one.kv.beside
    assert one.ledger.used == used


def test_growth_is_what_is_then_taken() -> None:
    wants: Wants | None = None
    from phasewise.engine.assembly import kv_shapes
    from phasewise.kv.buffer import Ledger
    from phasewise.request.counters import Counters

    ledger = Ledger(1 << 40)
    layers = [LayerKV(shape, Raw(), ledger, 64, wants) for shape in kv_shapes(tiny.model())]
    kv = KV(layers, Counters(), None, level=True)
    for i, layer in enumerate(kv.layers):
        rows = 60 - 20 * i if i < 3 else 5
        k = torch.zeros(layer.shape.heads, rows, layer.shape.dim)
        layer.append(k, k, range(rows))
        layer.commit(rows)
    kv.changed()
    assert kv.spare == 4
    for rows in (4, 5, 70, 200):
        before, growth = ledger.used, kv.growth(rows)
        kv.reserve(rows)
        assert ledger.used - before == growth and kv.spare >= rows
        assert all(layer.slabs[0].buffer.cap >= 60 + rows for layer in kv.layers)


# ---- engines
def test_prompts_come_whole_and_tokens_one_by_one() -> None:
    prompts = tiny.prompts(90, 40)
    want = tiny.outs(tiny.run(tiny.engine(VERBS | {"schedule": "prefill_first"}), prompts, tiny.greedy(12)))
    engine = tiny.engine(VERBS | {"schedule": "sarathi:budget=9"})
    assert isinstance(engine, Engine)
    request = Request(prompts[0], tiny.greedy(12))
    engine.add(request)
    engine.step()
    assert request.computed == 90 and request.out == want[0][:1]
    for _ in range(6):
        engine.step()
    engine.room.preempt(request)
    engine.step()
    assert request.computed == 90 and request.n_out == 7
    for computed in range(91, 96):
        engine.step()
        assert request.computed == computed
    tiny.finish(engine, [request])
    assert request.out == want[0]
    assert tiny.outs(tiny.run(tiny.engine(), prompts, tiny.greedy(12))) != want


MORE = [
    {"store": "int8"},
    {"place": "disaggregated"},
    {"schedule": "layered:rows_per_group=16"},
    {"decode": "contrastive:amateur=tiny-draft"},
    {"store": "cachegen:level=2", "place": "disaggregated"},
]


@pytest.mark.parametrize("more", MORE, ids=str)
def test_it_goes_with(more: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    double.everything(monkeypatch)
    prompts = tiny.prompts(70, 50)
    engine = tiny.engine(VERBS | more)
    got = tiny.outs(tiny.run(engine, prompts, tiny.greedy(N)))
    alone = [tiny.outs(tiny.run(tiny.engine(VERBS | {**more, "schedule": "prefill_first"}), [p], tiny.greedy(N)))[0]
             for p in prompts]  # fmt: skip
    assert got == alone
    assert engine.counters.handoffs == (2 if "place" in more else 0)


def test_eight_bits_hold_the_rows_that_came_back() -> None:
    model, text = tiny.model(), tiny.prompts(70)[0]
    one = over(model, text[:60], format=Int8().format())
    for tokens in [text[:60], *([token] for token in text[60:])]:
        one.feed(tokens)
    each = entry_bytes(one.kv.layers[0].format, one.kv.layers[0].shape) * 2
    assert one.kv.live_bytes == one.counters.row_layers * each


def test_a_step_tried_twice_leaves_one_trace() -> None:
    text = tiny.prompts(64)[0]
    one, twin = over(tiny.model(), text[:60]), over(tiny.model(), text[:60])
    for tokens in [text[:60], *([token] for token in text[60:])]:
        want = one.feed(tokens)
        twin.try_(tokens)
        with torch.inference_mode():
            twin.kv.commit(0)  # it failed
        assert torch.equal(twin.feed(tokens), want)
        mine, theirs = (each.request.state.get(NAME, {}) for each in (one, twin))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(a, b) for layer in mine for a, b in zip(mine[layer], theirs[layer]))
        assert [one.positions(i) for i in range(4)] == [twin.positions(i) for i in range(4)]


def test_forks_go_on_apart() -> None:
    text = tiny.prompts(70)[0]
    one = over(tiny.model(), text[:60])
    one.feed(text[:60])
    twin = one.fork()
    alone = over(tiny.model(), text[:60])
    alone.feed(text[:60])
    for token in text[60:]:
        one.feed([token])
        want = alone.feed([(token + 7) % 60 + 3])
        assert torch.equal(twin.feed([(token + 7) % 60 + 3]), want)
    one.kv.close()
    twin.kv.close()
    assert one.ledger.used == 0


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
def test_in_bfloat16_rows_do_not_depend_on_their_mates() -> None:
    model, prompts = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), tiny.prompts(120, 80, 33)
    alone = [tiny.outs(tiny.run(tiny.engine(VERBS, of=model), [p], tiny.greedy(20)))[0] for p in prompts]
    engine = tiny.engine(VERBS, of=model)
    assert tiny.outs(tiny.run(engine, prompts, tiny.greedy(20))) == alone
    falls = LazyLLM(keep=0.3).shares(4)
    first = sum(n + sum(going(falls[layer], n) for layer in range(3)) for n in (120, 80, 33))
    assert engine.counters.row_layers > first + 19 * 3 * 4, "nobody came back"


def test_nothing_is_shared() -> None:
    prompt = tiny.prompts(90)[0]
    engine = tiny.engine(VERBS)
    for _ in range(2):
        tiny.run(engine, [prompt], tiny.greedy(4))
    assert engine.counters.prefix_hits == 0


# ---- what is refused
@pytest.mark.parametrize(("knobs", "says"), [
    ({"keep": 0.0}, r"keep=0\.0 must lie above 0 and be at most 1"),
    ({"keep": 1.1}, r"keep=1\.1 must lie .* at most 1"),
    ({"start": 1.0}, r"start=1\.0 must be at least 0 and below 1"),
    ({"start": -0.1}, r"start=-0\.1 must be at least 0"),
    ({"stages": 0}, "stages=0 must be at least 1"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_bound(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"lazyllm: {says}"):
        LazyLLM(**knobs)


@pytest.mark.parametrize(("more", "said"), [
    ({"draft": "prompt_lookup"}, "skip lazyllm takes decoded tokens one at a time, and decode speculative may bring"),
    ({"decode": "block_diffusion:block=4"}, "one at a time, and decode block_diffusion may bring several"),
    ({"evict": "snapkv"}, "skip lazyllm also fills evict: leave out --evict snapkv"),
    ({"attend": "quest"}, "skip lazyllm also fills attend: leave out --attend quest"),
    ({"store": "kivi"}, "skip lazyllm lets single rows pass layers by. Leave out --skip"),
])  # fmt: skip
def test_who_does_not_go_with_it_is_refused_by_name(more: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny.engine(VERBS | more)
    with pytest.raises(UserError, match="may bring several"):
        drafting(VERBS, {})


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 1}, {"pooling": "mean"}], ids=str)
def test_rows_that_left_cannot_be_asked_about(asked: dict[str, Any]) -> None:
    engine = tiny.engine(VERBS)
    with pytest.raises(UserError, match=f"{next(iter(asked))} asks about rows of the prompt"):
        engine.add(Request(tiny.prompts(20)[0], Params(max_tokens=4, **asked)))
    tiny.engine({"skip": "all"}).add(Request(tiny.prompts(20)[0], Params(max_tokens=4, **asked)))
