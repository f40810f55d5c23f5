"""evict.h2o, tova, keyformer: what is left is what a row-by-row simulation over the whole attention matrix leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.methods.evict._allot import pyramid
from phasewise.methods.evict._noise import gumbel, philox
from phasewise.methods.evict.h2o import H2O
from phasewise.methods.evict.keyformer import Keyformer
from phasewise.methods.evict.tova import Tova
from phasewise.methods.store.int8 import Int8
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, seeds, tiny
from tests.evict.running import Slow, bound, held, left, scalar_gumbel
from tests.kv.harness import Walk, cuts, sliding

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
PROMPT, END = 40, 66
TOKENS = tiny.prompts(END)[0]
WAYS: dict[str, tuple[Any, Slow]] = {
    "h2o": (H2O(heavy=9, recent=5, lot=4), Slow(14, 5)),
    "h2o shares": (H2O(heavy=0.2, recent=0.1, lot=3), Slow(12, 4)),
    "h2o without recent rows": (H2O(heavy=8, recent=0, lot=1), Slow(8)),
    "h2o mean": (H2O(heavy=9, recent=5, mean=True, lot=4), Slow(14, 5, mean=True)),
    "h2o longer than the prompt": (H2O(heavy=40, recent=8, lot=4), Slow(48, 8)),
    "h2o pyramid": (H2O(heavy=12, recent=4, layers="pyramid", beta=5, lot=4),
                    Slow(16, 4, by_layer=[4 + n for n in pyramid(12, 36, 4, 5)])),
    "h2o ada": (H2O(heavy=12, recent=4, heads="ada", lot=4), Slow(16, 4, ada=0.2)),
    "tova": (Tova(keep=12, lot=4), Slow(12, sums=False, together=True)),
    "tova longer than the prompt": (Tova(keep=50, lot=4), Slow(50, sums=False, together=True)),
    "tova pyramid": (Tova(keep=12, layers="pyramid", beta=3, lot=4),
                     Slow(12, sums=False, together=True, by_layer=pyramid(12, 40, 4, 3))),
    "keyformer": (Keyformer(keep=15, tau_step=0.05, lot=4), Slow(15, 4, noise=True, step=0.05)),
    "keyformer ada": (Keyformer(keep=15, heads="ada", lot=4), Slow(15, 4, noise=True, step=0.01, ada=0.2)),
    "keyformer tempered": (Keyformer(keep=15, tau=2, noise=False, lot=1), Slow(15, 4, tau=2.0, step=0.01)),
}  # fmt: skip
EACH = ["h2o", "tova", "keyformer"]  # of the quick tier, whatever the day


def fresh(name: str) -> Slow:
    slow = WAYS[name][1]
    return Slow(**{field: getattr(slow, field) for field in ("rows", "recent", "sums", "together", "mean", "noise",
                                                             "tau", "step", "ada", "by_layer")})  # fmt: skip


@cache
def truth(name: str, model: Any = None) -> tuple[Slow, torch.Tensor]:
    """The simulation, fed a row at a time. -> it, and the logits of all rows"""
    slow = fresh(name)
    one = Walk(model or tiny.model(), TOKENS[:PROMPT], evict=slow)
    logits = [one.feed(TOKENS[:PROMPT]), *(one.feed([token]) for token in TOKENS[PROMPT:])]
    return slow, torch.cat(logits)


def walked(name: str, model: Any = None, **more: Any) -> tuple[Walk, Any]:
    runtime = bound(WAYS[name][0], model)
    return Walk(model or tiny.model(), TOKENS[:PROMPT], evict=runtime, **more), runtime


@pytest.mark.parametrize("name", seeds.params(WAYS, 0, "running", always=EACH))
def test_a_row_at_a_time(name: str) -> None:
    slow, want = truth(name)
    one, runtime = walked(name)
    got = [one.feed(TOKENS[:PROMPT])]
    for token in TOKENS[PROMPT:]:
        got.append(one.feed([token]))
        rows = [runtime.rows(PROMPT, layer) for layer in range(4)]
        for layer, heads in enumerate(held(one)):
            assert sum(heads) < len(heads) * (rows[layer] + runtime.way.lot), "fewer than budget + lot, always"
    torch.testing.assert_close(torch.cat(got), want, **CLOSE)
    assert left(one, runtime) == slow.left
    dense = oracle.logits(tiny.checkpoint(), TOKENS)
    assert (want - dense)[PROMPT:].abs().max() > 1e-2, "what went was worth something"
    torch.testing.assert_close(want[:PROMPT], dense[:PROMPT], **CLOSE)


@pytest.mark.parametrize("name", ["h2o", "tova pyramid", "keyformer ada"])
def test_what_has_gone_never_comes_back(name: str) -> None:
    """Step by step, each row dropped by itself: what is held was held before, or is new, and is never more than the
    budget (of competing heads, their sum)."""
    runtime = bound(replace(WAYS[name][0], lot=1))
    one = Walk(tiny.model(), TOKENS[:PROMPT], evict=runtime)
    one.feed(TOKENS[:PROMPT])
    budgets = [runtime.rows(PROMPT, layer) for layer in range(4)]
    before = [[set(range(PROMPT)) for _ in range(2)] for _ in range(4)]
    gone = [[set[int]() for _ in range(2)] for _ in range(4)]
    for at in range(PROMPT, END + 1):
        for layer, budget in enumerate(budgets):
            now = [set(one.positions(layer, head)) for head in range(2)]
            assert [sorted(own) for own in now] == left(one, runtime)[layer], "nothing lies idle"
            assert sum(map(len, now)) <= 2 * budget and ("ada" in name or max(map(len, now)) <= budget)
            for head, own in enumerate(now):
                assert own <= before[layer][head] | {at - 1} and not own & gone[layer][head]
                gone[layer][head] |= (before[layer][head] | {at - 1}) - own
        before = [[set(one.positions(layer, head)) for head in range(2)] for layer in range(4)]
        if at < END:
            one.feed([TOKENS[at]])
    assert all(len(own) > 10 for layer, own_heads in enumerate(gone) for own in own_heads if budgets[layer] < PROMPT)


def tree(at: int) -> tuple[list[int], list[int], list[int]]:
    """A draft whose rows 1, 3 and 5 below the pending one are right. -> tokens, parents, the path that stays"""
    right, wrong = TOKENS[at : at + 4], [3 + (token + 7) % 60 for token in TOKENS[at : at + 4]]
    return ([right[0], wrong[1], right[1], wrong[2], right[2], wrong[3], wrong[0], right[3]],
            [-1, 0, 0, 2, 2, 4, 4, 4], [0, 2, 4, 7])  # fmt: skip


@pytest.mark.parametrize("name", seeds.params(WAYS, 1, "running, however rows come", always=EACH))
def test_however_rows_come(name: str) -> None:
    """A prompt in pieces, steps that failed, draft trees of which a path stays, a fork, and rows that come several at
    once, as after a preemption: the logits and the scores of rows that come one by one."""
    slow, want = truth(name)
    one, runtime = walked(name)
    for piece in (TOKENS[:1], TOKENS[1:14], TOKENS[14:PROMPT]):
        for some in (piece, piece[:1]):
            one.try_(some)
            with torch.inference_mode():
                one.kv.commit(0)  # it failed
        at = one.request.computed
        torch.testing.assert_close(one.feed(piece), want[at : at + len(piece)], **CLOSE)
    at = PROMPT
    for keep in (4, 1, 0, 3, 2):
        tokens, parents, path = tree(at)
        got = one.try_(tokens, parents)
        torch.testing.assert_close(got[path], want[at : at + 4], **CLOSE)
        one.commit(tokens, path[:keep])
        at += keep
    twin = one.fork()
    for token in tiny.prompts(9, seed=5)[0]:
        twin.feed([token])
    for piece in cuts(TOKENS[at:], [1, 7, 2]):
        at = one.request.computed
        torch.testing.assert_close(one.feed(piece), want[at : at + len(piece)], **CLOSE)
    assert left(one, runtime) == slow.left


@pytest.mark.parametrize("name", ["h2o", "tova", "keyformer"])
def test_a_models_own_window_hides_rows_from_the_scores(name: str) -> None:
    model = sliding(16, 4)
    slow, want = truth(name, model)
    one, runtime = walked(name, model)
    got = torch.cat([one.feed(piece) for piece in [*cuts(TOKENS[:PROMPT], [11]), *cuts(TOKENS[PROMPT:], [3, 1])]])
    torch.testing.assert_close(got, want, **CLOSE)
    assert left(one, runtime) == slow.left


@pytest.mark.parametrize("name", ["tova", "h2o ada"])
def test_in_eight_bits_by_the_rows_as_they_are_kept(name: str) -> None:
    slow = fresh(name)
    true = Walk(tiny.model(), TOKENS[:PROMPT], evict=slow, format=Int8().format())
    true.feed(TOKENS[:PROMPT])
    one, runtime = walked(name, format=Int8().format())
    one.feed(TOKENS[:17])
    one.feed(TOKENS[17:PROMPT])
    for token in TOKENS[PROMPT:]:
        torch.testing.assert_close(one.feed([token]), true.feed([token]), **CLOSE)
    assert left(one, runtime) == slow.left


@pytest.mark.parametrize("name", ["h2o shares", "tova", "keyformer ada"])
def test_memory_really_falls(name: str) -> None:
    prompt = tiny.prompts(400)[0]
    runtime = bound(WAYS[name][0])
    one = Walk(tiny.model(), prompt, evict=runtime)
    one.feed(prompt)
    rows = sum(min(400, runtime.rows(400, layer)) for layer in range(4))
    assert one.kv.live_bytes == rows * 2 * (2 * 12 * 4), "heads x (key and value) x dim x float32, to the row"
    assert one.ledger.used == one.kv.bytes
    if rows < 1200:
        assert one.ledger.used < 0.6 * 4 * 448 * 2 * (2 * 12 * 4)


@pytest.mark.parametrize("name", ["h2o", "tova", "keyformer"])
def test_reads_are_counted(name: str) -> None:
    """A row after the prompt reads what is held, and its keys once more."""
    one, _ = walked(name)
    one.feed(TOKENS[:PROMPT])
    row = 2 * (2 * 12 * 4)  # bytes in a layer
    for token in TOKENS[PROMPT:]:
        before = one.counters.kv_bytes_read
        rows = sum(max(heads) + 1 for heads in held(one))
        one.feed([token])
        assert one.counters.kv_bytes_read - before == rows * row * 3 // 2


def test_prompts_of_all_queries_share_no_prefix() -> None:
    assert not H2O.traits.shares_prefix and not Keyformer.traits.shares_prefix
    assert Tova.traits.shares_prefix and bound(Tova()).observes == 1
    for name, hits in (("h2o", 0), ("keyformer", 0), ("tova", 32)):
        engine = tiny.engine({"evict": f"{name}:keep=9" if name != "h2o" else "h2o"})
        for _ in range(2):
            tiny_run = Request(TOKENS[:PROMPT], tiny.greedy(2))
            engine.add(tiny_run)
            while tiny_run.left is None:
                engine.step()
        assert engine.counters.prefix_hits == hits


@pytest.mark.parametrize(("verbs", "heads"), [("h2o:heavy=9,recent=5", 2), ("tova:keep=9", 1)])
def test_scores_are_booked_and_plain(verbs: str, heads: int) -> None:
    """Tensors in the drawer, and the bytes that they may take are in the ledger."""
    engine = tiny.engine({"evict": verbs}, prefix_cache=False)
    request = Request(TOKENS[:PROMPT], tiny.greedy(40))
    engine.add(request)
    while request.n_out < 39:
        engine.step()
        scores, kv = request.state[verbs.partition(":")[0]], request.kv
        assert kv is not None and sorted(scores) == [0, 1, 2, 3]
        taken = [own.nbytes for own in scores.values()]
        assert taken == [4 * heads * layer.n for layer in kv.layers]
        assert sum(taken) <= kv.beside == engine.kv_bytes - kv.bytes


# ---- Keyformer and H2O


@pytest.mark.parametrize("knobs", [{"heads": "ada"}, {"mean": True}], ids=str)
def test_keyformer_without_noise_keeps_the_rows_of_h2o(knobs: dict[str, Any]) -> None:
    """At every step, head by head; with noise or another temperature not."""

    def kept(method: Any) -> list[Any]:
        runtime = bound(replace(method, **knobs, lot=1))
        one = Walk(tiny.model(), TOKENS[:PROMPT], evict=runtime)
        one.feed(TOKENS[:PROMPT])
        found = [left(one, runtime)]
        for token in TOKENS[PROMPT:]:
            one.feed([token])
            found.append(left(one, runtime))
        return found

    bare = Keyformer(keep=20, recent=0.3, noise=False, tau=1.0, tau_step=0.0)
    want = kept(H2O(heavy=14, recent=6))
    assert len(want) == END - PROMPT + 1 and want[0] != want[-1]
    assert kept(bare) == want
    assert kept(replace(bare, noise=True)) != want and kept(replace(bare, tau=3.0)) != want


def test_noise_hangs_on_the_seed_and_on_nothing_else() -> None:
    (prompt, *mates), verbs = tiny.prompts(41, 33, 25), {"evict": "keyformer:keep=12,lot=4,mean=True"}

    def rows(seed: int, mates: list[list[int]]) -> Any:
        engine = tiny.engine(verbs)
        request = Request(prompt, Params(max_tokens=30, ignore_eos=True, seed=seed))
        for each in (*(Request(mate, tiny.greedy(30)) for mate in mates), request):
            engine.add(each)
        while request.n_out < 29:
            engine.step()
        assert request.kv is not None
        return [part.positions.tolist() for layer in request.kv.layers for part in layer.read()]

    assert rows(1, []) == rows(1, mates) != rows(2, [])


# ---- noise
@pytest.mark.parametrize(("counter", "key", "want"), [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], "d16cfe09 94fdcceb 5001e420 24126ea1"),
])  # fmt: skip
def test_philox_gives_the_published_numbers(counter: list[int], key: list[int], want: str) -> None:
    got = philox([torch.tensor(word) for word in counter], [torch.tensor(word) for word in key])
    assert " ".join(f"{int(word):08x}" for word in got) == want


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(1, 6), st.integers(0, 1 << 20))
def test_noise_in_bulk_is_noise_one_by_one(seed: int, group: int, first: int) -> None:
    seeds, rows, keys = (
        torch.tensor([seed, 7]),
        torch.tensor([first, first + 3]),
        torch.tensor([[5, 0, first], [1, 2, 3]]),
    )
    got = gumbel(seeds, rows, keys, torch.tensor([1, 4]), group, 2)
    assert got.shape == (2, group, 2, 3)
    for h, head in enumerate((1, 4)):
        for g in range(group):
            want = [[scalar_gumbel(int(s), int(r), int(k), head, g, group, 2) for k in keys[h]]
                    for s, r in zip(seeds, rows)]  # fmt: skip
            torch.testing.assert_close(got[h, g], torch.tensor(want), atol=1e-4, rtol=1e-4)


def test_noise_is_gumbels() -> None:
    drawn = gumbel(torch.tensor([3] * 50), torch.arange(50), torch.arange(400)[None], torch.arange(2), 4, 0).double()
    n = drawn.numel()
    assert abs(float(drawn.mean()) - 0.57722) < 4 * 1.2825 / n**0.5
    assert abs(float(drawn.var()) - 1.64493) < 0.05
    for quantile in (0.01, 0.5, 0.99):
        at = -math.log(-math.log(quantile))
        assert abs(float((drawn < at).double().mean()) - quantile) < 4 * (quantile * (1 - quantile) / n) ** 0.5
    flat = drawn.flatten(2)
    assert abs(float(torch.corrcoef(torch.stack([flat[0, 0], flat[0, 1]]))[0, 1])) < 0.04, "heads are independent"


# ---- knobs
@pytest.mark.parametrize(("cls", "knobs", "value"), [
    (H2O, {"heavy": -1}, "heavy=-1"), (H2O, {"heavy": 0, "recent": 0}, "heavy=0 and recent=0"),
    (H2O, {"lot": 0}, "lot=0"), (H2O, {"layers": "cone"}, "layers='cone'"), (H2O, {"heads": "all"}, "heads='all'"),
    (Tova, {"keep": 0}, "keep=0"), (Tova, {"beta": 0.5}, "beta=0.5"), (Keyformer, {"keep": -1}, "keep=-1"),
    (Keyformer, {"recent": 2}, "recent=2"), (Keyformer, {"tau": 0}, "tau=0"),
    (Keyformer, {"tau_step": float("inf")}, "tau_step=inf"),
    (Keyformer, {"tau_step": -1}, "tau_step=-1"), (H2O, {"least": 2}, "least=2"),
    (H2O, {"heavy": 1.5}, "h2o: heavy=1.5: above 1 it is a number of rows, which 1.5 is not: say 2, or a share up to"),
    (H2O, {"recent": 7.5}, "h2o: recent=7.5: above 1 .*: say 7 or 8, or a share up to 1"),
    (Tova, {"keep": 1.5}, "tova: keep=1.5: above 1"), (Keyformer, {"keep": 1.2}, "keyformer: keep=1.2: above 1"),
    (Tova, {"keep": math.inf}, "tova: keep=inf: above 1 .*: say a whole one"),
])  # fmt: skip
def test_bad_knobs_are_named(cls: Any, knobs: dict[str, Any], value: str) -> None:
    with pytest.raises(UserError, match=value):
        cls(**knobs)
