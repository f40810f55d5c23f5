"""Drafts of more than 64 rows: native where they are in 16 bits, exact, and booked in the KV budget as any others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from phasewise.bench.drive import Bench
from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.match import Match
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse
from phasewise.request.request import Request
from phasewise.step.span import Span
from phasewise.verbs.draft import Draft, Drafter
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.traits import Traits
from tests import tiny
from tests.watched import passes

N, WIDE, DEEP, LONG = 24, 40, 3, 80
PROMPTS = tiny.prompts(33, 5, 64, 17)
Script = dict[tuple[int, ...], list[int]]


def wide(truth: Sequence[int], seed: int) -> Draft:
    """The next tokens, each among `WIDE` children of the one before, the others wrong."""
    draft, parent = Draft([], []), -1
    for right in truth[:DEEP]:
        at = (7 * right + seed) % WIDE
        level = [3 + (right + 1 + i) % (tiny.VOCAB - 4) for i in range(WIDE)]
        level[at] = right
        draft.tokens.extend(level)
        draft.parents.extend([parent] * WIDE)
        parent = len(draft.tokens) - WIDE + at
    return draft


def long(truth: Sequence[int], seed: int) -> Draft:
    """A chain of the next tokens, one of the last of them wrong."""
    return Draft.chain([*truth[: LONG - 5], 3, *truth[LONG - 4 : LONG]])


class Drafts(Method, Drafter):
    """Guesses made from outputs that are known."""

    traits: ClassVar[Traits] = Traits("draft", max_nodes=WIDE * DEEP)

    def __init__(self, script: Script, make: Callable[[Sequence[int], int], Draft]) -> None:
        self.script, self.make = script, make

    def size(self, request: Request) -> int:
        return self.traits.max_nodes

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        truths = (self.script[tuple(request.prompt)][request.n_out :] for request in requests)
        return [self.make(truth, request.known).cut(most) for truth, request, most in zip(truths, requests, budgets)]

    def learn(self, spans: Sequence[Span], hidden: Any, outcomes: Any, tops: Any = None) -> None:
        """Nothing."""


def drafting(
    model: Model, script: Script, make: Any = wide, kv_bytes: int = 64 << 20, attend: str = "dense",
    prefix_cache: bool = False,
) -> Placed:  # fmt: skip
    methods = parse({"schedule": "prefill_first", "attend": attend})
    methods["decode"] = Speculative(Drafts(script, make), Match())
    return Builder(model, methods, Limits(kv_bytes=kv_bytes, prefix_cache=prefix_cache), load=tiny.load).build()


def alone(model: Model, tokens: int = N, prompts: Sequence[list[int]] = PROMPTS) -> Script:
    return {
        tuple(prompt): tiny.outs(tiny.run(tiny.engine(of=model), [prompt], tiny.greedy(tokens)))[0]
        for prompt in prompts
    }


def test_they_are_exact_and_take_few_steps() -> None:
    script = alone(tiny.model())
    engine = drafting(tiny.model(), script)
    assert tiny.outs(tiny.run(engine, PROMPTS, tiny.greedy(N))) == list(script.values())
    assert engine.counters.forwards <= 1 + -(-N // (DEEP + 1)) + 1
    assert engine.counters.drafted > 64 * len(PROMPTS) * 4


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_natively_no_row_depends_on_mates(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many trees a step holds: together they are cut into several calls, never one of them in two."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    script = alone(model)
    want = [tiny.outs(tiny.run(drafting(model, script), [p], tiny.greedy(N)))[0] for p in PROMPTS]
    made = passes(monkeypatch)
    engine = drafting(model, script)
    assert tiny.outs(tiny.run(engine, PROMPTS, tiny.greedy(N))) == want
    assert len(made) == engine.counters.forwards and all(each.whole for each in made)
    assert max(each.rows for each in made) > len(PROMPTS) * 64


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_what_large_trees_have_in_common_is_read_once() -> None:
    """And not a bit of their rows changes by that."""
    model, shared = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), tiny.prompts(130, seed=1)[0]
    prompts = [shared + prompt for prompt in PROMPTS]
    script = alone(model, prompts=prompts)

    def run(attend: str) -> tuple[list[list[int]], int]:
        engine = drafting(model, script, attend=attend, prefix_cache=True)
        tiny.run(engine, [shared], tiny.greedy(1))
        return tiny.outs(tiny.run(engine, prompts, tiny.greedy(N))), engine.counters.kv_bytes_read

    script[tuple(shared)] = [3] * N
    (dense, read), (once, less) = run("dense"), run("hydragen:rows=64")
    assert once == dense and less < read


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_a_long_chain_has_the_bits_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows lie where those of plain decoding would; so the tokens are the same in 16 bits too."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    script, made = alone(model, tokens=200), passes(monkeypatch)
    engine = drafting(model, script, long)
    for prompt in PROMPTS:
        made.clear()
        assert tiny.outs(tiny.run(engine, [prompt], tiny.greedy(200))) == [script[tuple(prompt)]]
        assert all(each.whole for each in made) and [each.rows for each in made[1:3]] == [LONG + 1] * 2


@pytest.mark.parametrize("rows", [256, 512, 1024])
def test_their_rows_are_within_the_budget(rows: int) -> None:
    """A tree's rows are booked before they are computed: never more bytes than there are, whoever has to wait or to be
    preempted for that; the tokens stay. A request whose tree would never find room is refused when it arrives."""
    model = tiny.model()
    script = alone(model)
    per_row = 2 * 4 * model.config.layers * model.config.kv_heads * model.config.head_dim  # float32
    engine: Any = drafting(model, script, kv_bytes=rows * per_row)
    drafter, booked = engine.parts.phases[-1].decode.drafter, list[tuple[int, int]]()

    def learn(spans: Sequence[Span], hidden: Any, outcomes: Any) -> None:
        booked.extend((span.kv.bytes, (span.request.computed + span.rows) * per_row) for span in spans)
        assert engine.kv_bytes <= rows * per_row

    drafter.learn = learn
    assert tiny.outs(tiny.run(engine, PROMPTS, tiny.greedy(N))) == list(script.values())
    assert all(held >= used for held, used in booked) and max(used for _, used in booked) > 64 * per_row
    assert (engine.counters.preemptions > 0) == (rows < 1024)
    small = drafting(model, script, kv_bytes=192 * per_row)
    with pytest.raises(UserError, match=f"{len(PROMPTS[2]) + N + WIDE * DEEP} tokens"):
        small.add(Request(PROMPTS[2], tiny.greedy(N)))


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_trees_that_a_second_model_grows_are_native_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    made = passes(monkeypatch)
    second = f"draft_model:model={tiny.checkpoint(hidden=64, layers=2, seed=1)},k=3,branches=3"
    engine = Bench(model).engine({"draft": second}, Limits(prefix_cache=False))
    tiny.run(engine, PROMPTS, tiny.greedy(N))
    assert engine.counters.draft_forwards > engine.counters.forwards
    assert len(made) == engine.counters.forwards + engine.counters.draft_forwards and all(each.whole for each in made)
