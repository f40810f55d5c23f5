"""decode.augment: latents behind a prompt, against lists of keys and values kept by hand, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.methods.decode.augment import GAIN, SOFT, Augment
from phasewise.model import artefacts
from phasewise.model.lowrank import Delta, Deltas
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.skip.test_unified import ByHand
from tests.watched import passes

COUNT, N = 5, 12
VERBS = {"decode": f"augment:latents={COUNT},weights=random:0"}
PROMPTS = tiny.prompts(41, 7, 90, 1)


class Slow(ByHand):
    """Two passes over lists of rows, one row at a time; the coprocessor's rows go again."""

    def __init__(self, model: Model, count: int = COUNT) -> None:
        super().__init__(model)
        self.count_of = count
        tensors = artefacts.random(Augment(count).artefact(model.config), "0")
        self.soft, self.gain = tensors.pop(SOFT), tensors.pop(GAIN)
        self.deltas = Deltas([(Delta(tensors, model.dtype, model.device), None)])

    def row(self, x: Tensor, position: int, deltas: Deltas | None = None) -> Tensor:
        self.rotary = self.model.rotary(torch.tensor([position]))
        for layer in range(self.model.config.layers):
            x = self.model.layer(layer, x, self, deltas)
        return x

    @torch.inference_mode()
    def say(self, prompt: Sequence[int], n: int) -> list[int]:
        model, end = self.model, len(prompt)
        for at, token in enumerate(prompt):
            self.row(model.embed(torch.tensor([token])), at)
        before = {layer: list(rows) for layer, rows in self.rows.items()}
        made = [self.row(self.soft[i : i + 1], end + i, self.deltas) for i in range(self.count_of)]
        self.rows = before
        for i, x in enumerate(made):
            last = self.row(model.norm(x) * self.gain, end + i)
        out = [int(model.head(last).argmax())]
        while len(out) < n:
            x = self.row(model.embed(torch.tensor([out[-1]])), end + self.count_of + len(out) - 1)
            out.append(int(model.head(x).argmax()))
        return out


def by_hand(prompts: Sequence[Sequence[int]], model: Model | None = None) -> list[list[int]]:
    return [Slow(model or tiny.model()).say(prompt, N) for prompt in prompts]


def built(verbs: dict[str, str] = VERBS, **limits: Any) -> Engine:
    engine = tiny.engine(verbs, **limits)
    assert isinstance(engine, Engine)
    return engine


def test_tokens_are_those_of_rows_kept_by_hand() -> None:
    got = tiny.outs(tiny.run(tiny.engine(VERBS), PROMPTS, tiny.greedy(N)))
    assert got == by_hand(PROMPTS)
    assert got != tiny.plain(PROMPTS, tiny.greedy(N))


def test_no_latents_is_the_base() -> None:
    engine = built({"decode": "augment:latents=0"})
    assert tiny.outs(tiny.run(engine, PROMPTS, tiny.greedy(N))) == tiny.plain(PROMPTS, tiny.greedy(N))
    assert engine.counters.rows == sum(map(len, PROMPTS)) + len(PROMPTS) * (N - 1)


def test_rows_and_bytes_are_closed_forms() -> None:
    """A prompt, the coprocessor's rows, as many latents, and a row for each token after the first."""
    for count in (1, 5, 16):
        engine = built({"decode": f"augment:latents={count},weights=random:0"}, prefix_cache=False)
        request = Request(PROMPTS[0], tiny.greedy(N))
        engine.add(request)
        held = 0
        while request.left is None:
            engine.step()
            if request.kv is not None:
                assert request.kv.layers[0].n == request.computed + (count if request.n_out else 0) + (
                    not request.n_out and request.computed == request.prompt_len - 1
                )
                held = request.kv.layers[0].n
        assert engine.counters.rows == len(PROMPTS[0]) + 2 * count + N - 1
        assert engine.counters.prompt_rows == len(PROMPTS[0]) + 2 * count
        assert engine.counters.kv_bytes_written == engine.counters.rows * engine.store.row_bytes
        assert held == len(PROMPTS[0]) + count + N - 2
        assert engine.kv_bytes == 0 and request.known == len(PROMPTS[0]) + N, "no token stands for them"
        said = catalog.build("decode", f"augment:latents={count},weights=random:0").traits.added_rows
        assert said == count, "usage counts them (`LLM.adds`)"


def test_the_prompts_rows_are_the_bases_to_the_bit_and_are_shared() -> None:
    """Whoever comes later takes them from the prefix cache, of this recipe or the plain one; latents are nobody's."""
    from tests.laws import mixed

    prompt = tiny.prompts(96)[0]
    want = Slow(tiny.model()).say(prompt, N)
    placed = mixed.build({"mine": VERBS}, {})

    def serve(prompt: list[int], recipe: str) -> list[int]:
        request = Request(prompt, tiny.greedy(N), recipe=recipe)
        placed.add(request)
        while request.left is None:
            placed.step()
        return request.out

    for recipe in ("mine", "", "mine"):
        assert serve(prompt, recipe) == (want if recipe else tiny.plain([prompt], tiny.greedy(N))[0])
    assert placed.counters.prefix_hits == 2 * 64
    longer = [*prompt, *[prompt[-1]] * COUNT, *prompt[:40]]  # what stands in the place of latents, as a text
    assert serve(longer, "") == tiny.plain([longer], tiny.greedy(N))[0]
    assert placed.counters.prefix_hits == 2 * 64 + 96
    placed.forget_prefixes()
    assert placed.kv_bytes == 0


def test_a_cancelled_request_leaves_nothing() -> None:
    for steps in range(5):
        engine = built(VERBS | {"schedule": "sarathi:budget=24"}, prefix_cache=False)
        request = Request(PROMPTS[0], tiny.greedy(N))
        engine.add(request)
        for _ in range(steps):
            engine.step()
        engine.cancel(request)
        assert engine.kv_bytes == 0 and not request.state


def test_a_step_that_fails_is_tried_again_and_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of a step that raised give what the whole would have given, whatever layers it was to run."""
    import phasewise.engine.attempt as attempt

    for schedule in ("prefill_first", "layered:rows_per_group=4"):
        real, calls = attempt.forward, 0

        def failing(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 3 == 0 and len(args[1]) > 1:
                raise RuntimeError("now and then")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(attempt, "forward", failing)
            requests = tiny.run(tiny.engine(VERBS | {"schedule": schedule}), PROMPTS[:3], tiny.greedy(N))
        assert calls and tiny.outs(requests) == by_hand(PROMPTS[:3])


def test_siblings_share_prompt_and_latents() -> None:
    sampled = Params(max_tokens=N, ignore_eos=True, temperature=0.8, seed=3)
    engine = built(prefix_cache=False)
    one = Request(PROMPTS[0], sampled)
    every = [one, *(one.sibling(i) for i in (1, 2))]
    for request in every:
        engine.add(request)
    tiny.finish(engine, every)
    assert engine.counters.rows == len(PROMPTS[0]) + 2 * COUNT + 3 * (N - 1)
    for request in every:
        alone = Request(PROMPTS[0], request.params)
        other = built()
        other.add(alone)
        tiny.finish(other, [alone])
        assert alone.out == request.out


def test_log_probabilities_are_of_the_texts_own_tokens() -> None:
    params = replace(tiny.greedy(N), logprobs=1, prompt_logprobs=0, provenance=True)
    (request,) = tiny.run(tiny.engine(VERBS), PROMPTS[:1], params)
    (plain,) = tiny.run(tiny.engine(), PROMPTS[:1], params)
    assert sorted(request.scores) == sorted(plain.scores) == list(range(1, request.known))
    for at in range(1, request.prompt_len):
        assert request.scores[at].logprob == pytest.approx(plain.scores[at].logprob, abs=1e-4)
    tops = [request.scores[at].top[0][0] for at in range(request.prompt_len, request.known)]
    assert tops == request.out and request.scores[request.prompt_len].origin == "prefill"


def test_a_text_ends_before_the_context_does() -> None:
    engine = built()
    context = tiny.model().config.max_positions
    assert engine.reach("") == context - COUNT
    prompt = tiny.prompts(context - COUNT - 4)[0]
    (request,) = tiny.run(engine, [prompt], tiny.greedy(1 << 20))
    assert request.known == context - COUNT and request.n_out == 4
    with pytest.raises(UserError, match=f"context is {context - COUNT}"):
        engine.add(Request(tiny.prompts(context - COUNT)[0], tiny.greedy(1)))


@pytest.mark.parametrize("latents", [-1, 257])
def test_knobs_are_checked(latents: int) -> None:
    with pytest.raises(UserError, match=f"latents={latents} must lie in"):
        Augment(latents)


@pytest.mark.parametrize(("verb", "name"), [("attend", "quest"), ("attend", "hydragen"), ("evict", "snapkv"),
                                            ("skip", "unified:weights=none")])  # fmt: skip
def test_who_looks_at_rows_is_refused_by_name(verb: str, name: str) -> None:
    with pytest.raises(UserError, match=f"decode augment brings its own {verb}: leave out --{verb}"):
        tiny.engine(VERBS | {verb: name})
    tiny.engine({"decode": "augment:latents=0", verb: name})


def test_missing_weights_are_named_with_what_trains_them() -> None:
    with pytest.raises(UserError, match=r"phasewise train artefact decode.augment:latents=16 .*or say latents=0"):
        tiny.engine({"decode": "augment"})


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
def test_in_bfloat16_only_the_coprocessor_takes_the_open_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither chunks nor mates change a token."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    outs = []
    for others, schedule in (([], "prefill_first"), (tiny.prompts(33, 50), "sarathi:budget=70")):
        engine = tiny.engine(VERBS | {"schedule": schedule}, of=model)
        made = passes(monkeypatch)
        requests = [Request(prompt, tiny.greedy(N)) for prompt in (PROMPTS[0], *others)]
        for request in requests:
            engine.add(request)
        tiny.finish(engine, requests)
        outs.append(requests[0].out)
        assert others or len(made) == engine.counters.forwards - 1 == N + 1
    assert outs[0] == outs[1]
