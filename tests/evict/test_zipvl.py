"""evict.zipvl: the tokens that a full attention matrix names, no attention for the others, and no row of theirs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.format import entry_bytes
from phasewise.methods.attend.dense import Dense
from phasewise.methods.evict.zipvl import Zipped, ZipVL, fewest
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.step.read import Read
from phasewise.verbs.host import Host
from tests import oracle, tiny, uncached
from tests.asking import Asking
from tests.kv.harness import Walk, cuts, mixed, sliding

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
KNOBS: dict[str, Any] = {"tau": 0.6, "window": 5, "probes": 6}


def zipped(model: Model | None = None, **knobs: Any) -> Zipped:
    return ZipVL(**(KNOBS | knobs)).bind(Host(model or tiny.model(), None, None, None, None))  # type: ignore[arg-type]


class Slow(Asking):
    """The method in Python: whole attention matrices, tokens chosen one by one, attention masked to them.

    `chosen`: by layer, filled in as the prompt runs.
    """

    def __init__(self, of: Zipped) -> None:
        self.of, self.chosen = of, dict[int, list[int]]()

    def __call__(self, reads: list[Read]) -> list[Tensor]:
        return [self._one(read) for read in reads]

    def _one(self, read: Read) -> Tensor:
        q, k, v = read.q, read.part.k, read.part.v
        rows, heads, window = q.shape[0], k.shape[0], read.step.model.config.attention[read.layer].window
        group = q.shape[1] // heads
        sees = [[j <= i and (window is None or i - j < window) for j in range(rows)] for i in range(rows)]
        a = torch.zeros(q.shape[1], rows, rows)
        for head in range(q.shape[1]):
            logits = q[:, head] @ k[head // group].T * read.scale
            a[head] = logits.masked_fill(~torch.tensor(sees), float("-inf")).softmax(-1)
        stay = self.chosen[read.layer] = self._named(a, sees, read.layer)
        out = torch.zeros_like(q)
        for i in stay if self.of.knobs.queries == "important" else range(rows):
            seen = [j for j in stay if sees[i][j]]
            if not seen:
                continue
            for head in range(q.shape[1]):
                weights = (q[i, head] @ k[head // group, seen].T * read.scale).softmax(-1)
                out[i, head] = weights @ v[head // group, seen]
        return out

    def _named(self, a: Tensor, sees: list[list[bool]], layer: int) -> list[int]:
        knobs, n = self.of.knobs, a.shape[-1]
        probes = self.of.probed(n, layer).tolist()
        assert len(set(probes)) == min(n, knobs.window + knobs.probes) and probes == sorted(probes)
        assert probes[-knobs.window :] == list(range(n - knobs.window, n))
        drawn = [sum(float(a[:, i, j].sum()) for i in probes) for j in range(n)]
        share, number = 0.0, 0
        for value in sorted(drawn, reverse=True):
            if share >= knobs.tau * sum(drawn):
                break
            share, number = share + value, number + 1
        per_probe = [drawn[j] / max(1, sum(sees[i][j] for i in probes)) for j in range(n)]
        older = sorted(range(n - knobs.window), key=lambda j: -per_probe[j])[: max(0, number - knobs.window)]
        return sorted(older) + list(range(n - knobs.window, n))


def over(model: Model, prompt: list[int], **knobs: Any) -> Walk:
    """A request whose prompt is to be read by the method."""
    fast = zipped(model, **knobs)
    one = Walk(model, prompt, evict=fast, attend=fast)
    one.plain = one.phase
    return one


def both(model: Model, prompt: list[int], **knobs: Any) -> tuple[Walk, Tensor, Slow, Tensor]:
    """The method over a prompt and its slow twin: walks with logits."""
    one, slow = over(model, prompt, **knobs), Slow(zipped(model, **knobs))
    got = one.feed(prompt)
    two = Walk(model, prompt, attend=slow)
    two.plain = two.phase
    return one, got, slow, two.feed(prompt)


@pytest.mark.parametrize(("kind", "tau"), [("plain", 0.3), ("plain", 0.9), ("sliding", 0.6), ("mixed", 0.6)])
def test_gathered_attention_is_attention_masked_to_the_named_tokens(kind: str, tau: float) -> None:
    model = {"plain": tiny.model, "sliding": lambda: sliding(24, 3), "mixed": lambda: mixed(20)}[kind]()
    prompt = tiny.prompts(60)[0]
    one, got, slow, want = both(model, prompt, tau=tau)
    layers = range(model.config.layers)
    assert [one.positions(layer) for layer in layers] == [slow.chosen[layer] for layer in layers]
    assert any(5 < len(slow.chosen[layer]) < 60 for layer in layers)
    torch.testing.assert_close(got, want, **CLOSE)
    assert (got - uncached.logits(model, prompt)).abs().max() > 1e-2, "what was left out was worth something"


@pytest.mark.parametrize("kind", ["plain", "sliding"])
def test_queries_of_all_tokens_read_the_important_ones_before_them(kind: str) -> None:
    model, prompt = {"plain": tiny.model, "sliding": lambda: sliding(24, 3)}[kind](), tiny.prompts(60)[0]
    one, got, slow, want = both(model, prompt, queries="all")
    assert [one.positions(layer) for layer in slow.chosen] == list(slow.chosen.values())
    torch.testing.assert_close(got, want, **CLOSE)
    _, others, _, _ = both(model, prompt)
    assert (got - others).abs().max() > 1e-2, "tokens that pass the attention by have other states"


def test_layers_keep_numbers_of_their_own() -> None:
    one, _, slow, _ = both(tiny.model(), tiny.prompts(80)[0])
    assert len({len(stay) for stay in slow.chosen.values()}) > 1
    assert [one.kv.layers[i].n for i in range(4)] == [len(slow.chosen[i]) for i in range(4)]
    each = entry_bytes(one.kv.layers[0].format, one.kv.layers[0].shape)
    rows = sum(len(stay) for stay in slow.chosen.values())
    assert one.kv.live_bytes == rows * 2 * each
    assert one.counters.kv_bytes_read == (4 * 80 * 2 * each) // 2 + rows * 2 * each, "keys for the probes, and the rest"
    assert one.ledger.used == one.kv.bytes
    assert not one.request.state["zipvl"]


def test_the_number_is_a_closed_form_where_attention_is_one() -> None:
    for n, tau in ((10, 0.7), (97, 0.6), (100, 0.29), (64, 1.0), (7, 0.01)):
        assert fewest(torch.full((n,), 0.3), tau) == math.ceil(tau * n)
    peaked = torch.tensor([1e-3] * 50 + [40.0] + [1e-3] * 49)
    assert fewest(peaked, 0.9) == 1
    numbers = [fewest(torch.rand(200, generator=torch.Generator().manual_seed(1)) ** 4, t / 50) for t in range(1, 51)]
    assert numbers == sorted(numbers) and numbers[0] < numbers[-1], "monotone in tau"


@pytest.mark.parametrize("prompt", [1, 4, 5, 60])
def test_all_attention_or_no_older_token_is_dense(prompt: int) -> None:
    tokens = tiny.prompts(70)[0]
    for knobs in ({"tau": 1.0}, {"window": 64}):
        one = over(tiny.model(), tokens[:prompt], **knobs)
        got = one.feed(tokens[:prompt])
        torch.testing.assert_close(got, oracle.logits(tiny.checkpoint(), tokens[:prompt]), **CLOSE)
        assert one.kv.layers[0].slabs[0].positions is None, "nothing was moved"


def test_a_step_tried_twice_chooses_once() -> None:
    prompt = tiny.prompts(60)[0]
    _, _, slow, _ = both(tiny.model(), prompt)
    one = over(tiny.model(), prompt)
    one.try_(prompt)
    one.kv.commit(0)  # it failed
    one.feed(prompt)
    assert [one.positions(layer) for layer in range(4)] == list(slow.chosen.values())


def test_decoding_reads_what_stayed_at_true_positions() -> None:
    tokens = tiny.prompts(80)[0]
    outs = []
    for sizes in ([1], [1, 4, 7]):
        one, first, slow, _ = both(tiny.model(), tokens[:60])
        one.phase = replace(one.phase, attend=Dense(), evict=None)  # as in decode
        outs.append(torch.cat([first, *(one.feed(piece) for piece in cuts(tokens[60:], sizes))]))
        for layer in range(4):
            assert one.positions(layer) == [*slow.chosen[layer], *range(60, 80)]
    torch.testing.assert_close(outs[0], outs[1], **CLOSE)


VERBS = {"evict": "zipvl:tau=0.6,window=5,probes=6"}


def test_prompts_come_whole_whatever_the_scheduler_gives() -> None:
    prompts = tiny.prompts(90, 40)
    want = tiny.outs(tiny.run(tiny.engine(VERBS | {"schedule": "prefill_first"}), prompts, tiny.greedy(12)))
    engine = tiny.engine(VERBS | {"schedule": "sarathi:budget=9"})
    request = Request(prompts[0], tiny.greedy(12))
    engine.add(request)
    engine.step()
    assert request.computed == 90 and request.out == want[0][:1]
    engine = tiny.engine(VERBS | {"schedule": "sarathi:budget=9"})
    assert tiny.outs(tiny.run(engine, prompts, tiny.greedy(12))) == want
    assert tiny.outs(tiny.run(tiny.engine(), prompts, tiny.greedy(12))) != want


def test_in_bfloat16_rows_do_not_depend_on_their_mates() -> None:
    model, prompts = Model.load(tiny.checkpoint(), dtype=torch.bfloat16), tiny.prompts(120, 80, 33)
    alone = [tiny.outs(tiny.run(tiny.engine(VERBS, of=model), [p], tiny.greedy(16)))[0] for p in prompts]
    assert tiny.outs(tiny.run(tiny.engine(VERBS, of=model), prompts, tiny.greedy(16))) == alone


def test_memory_that_is_too_small_for_a_whole_prompt_waits_and_loses_nothing() -> None:
    prompts = tiny.prompts(90, 80, 70)
    want = tiny.outs(tiny.run(tiny.engine(VERBS), prompts, tiny.greedy(20)))
    row = tiny.engine(VERBS).store.row_room
    engine = tiny.engine(VERBS, kv_bytes=200 * row)
    assert tiny.outs(tiny.run(engine, prompts, tiny.greedy(20))) == want


@pytest.mark.parametrize(("knobs", "says"), [
    ({"tau": 0.0}, r"tau=0\.0 must lie above 0 and be at most 1"), ({"tau": 1.1}, r"tau=1\.1 must lie .* at most 1"),
    ({"window": 0}, "window=0 must be at least 1"), ({"probes": -1}, "probes=-1 must be at least 0"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_bound(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"zipvl: {says}"):
        ZipVL(**knobs)


def test_who_computes_prompts_in_blocks_or_fills_its_slot_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="zipvl takes prompts whole, and decode block_diffusion"):
        tiny.engine(VERBS | {"decode": "block_diffusion:block=4"})
    with pytest.raises(UserError, match="evict zipvl also fills attend: leave out --attend quest"):
        tiny.engine(VERBS | {"attend": "quest"})
