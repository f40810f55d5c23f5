"""decode.c2c: fused rows against a fuser worked out row by row, what closed gates and other models change, refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.builder import Builder
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv import handoff
from phasewise.methods.decode import c2c as module
from phasewise.methods.decode._fuser import layer_map
from phasewise.methods.decode.c2c import C2C, Fuser, fuse
from phasewise.model import artefacts
from phasewise.model.artefacts import fingerprint
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import parse
from phasewise.reproduce.systems.c2c import PermutedSharer, Reversed
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, tiny
from tests.skip.test_unified import ByHand

KNOBS = "c2c:sharer=tiny-draft,weights=random:0,piece=16"
VERBS = {"decode": KNOBS}
N = 12
(TEXT,) = tiny.prompts(50)


def built(verbs: Mapping[str, Any] | None = None, of: Model | None = None, **limits: Any) -> Engine:
    engine = tiny.engine(VERBS if verbs is None else dict(verbs), of=of, **limits)
    assert isinstance(engine, Engine)
    return engine


def serve(engine: Any, prompt: Sequence[int], params: Params | None = None) -> Request:
    (request,) = tiny.run(engine, [prompt], params or tiny.greedy(N))
    assert request.left is not None and request.left.how == "finished"
    return request


def declared(sharer: Model, name: str = "tiny-draft") -> artefacts.Artefact:
    return C2C(name).artefact(tiny.model().config, sharer.config, fingerprint(sharer))


# ---- by hand
def block(w: Mapping[str, Tensor], name: str, layer: int, x: Tensor) -> Tensor:
    normed = x / (x.pow(2).mean() + 1e-6).sqrt() * w[f"{name}.norm"][layer]
    up = w[f"{name}.up"][layer] @ normed
    half = len(up) // 2
    return x + w[f"{name}.down"][layer] @ (F.silu(up[:half]) * up[half:])


def fused(w: Mapping[str, Tensor], side: str, layer: int, own: Tensor, other: Tensor) -> Tensor:
    """One row of one layer, [H, D]."""
    if w[f"{side}.gate"][layer] <= 0:
        return own
    both = torch.cat((other.flatten(), own.flatten()))
    trunk = block(w, f"{side}.trunk", layer, w[f"{side}.in"][layer] @ both + w[f"{side}.in.bias"][layer])
    content = w[f"{side}.out"][layer] @ block(w, f"{side}.content", layer, trunk) + w[f"{side}.out.bias"][layer]
    share = w[f"{side}.head"][layer] @ block(w, f"{side}.share", layer, trunk) + w[f"{side}.head.bias"][layer]
    return own + share.sigmoid()[:, None] * content.view(own.shape)


@torch.inference_mode()
def by_hand(prompt: Sequence[int], n: int = N, seed: int = 0) -> list[int]:
    """Both models row by row, every row fused by itself, then the last token and what follows."""
    base, small = tiny.model(), tiny.load("tiny-draft")
    w = artefacts.random(declared(small), str(seed))
    read, slow = ByHand(small), ByHand(base)
    for at, token in enumerate(prompt[:-1]):
        read.run(token, at, range(small.config.layers))
        slow.run(token, at, range(base.config.layers))
    for layer, rows in slow.rows.items():
        other = read.rows[max(0, layer - base.config.layers + small.config.layers)]
        slow.rows[layer] = [
            (fused(w, "k", layer, k, other[at][0]), fused(w, "v", layer, v, other[at][1]))
            for at, (k, v) in enumerate(rows)
        ]
    token, out = prompt[-1], list[int]()
    for i in range(n):
        token = slow.run(token, len(prompt) - 1 + i, range(base.config.layers))
        out.append(token)
    return out


@pytest.mark.parametrize("length", [2, 17, 50])
def test_tokens_are_those_of_rows_fused_by_hand(length: int) -> None:
    mine = serve(built(), TEXT[:length])
    assert mine.out == by_hand(TEXT[:length]) and mine.recalled == length - 1
    if length == 50:
        assert mine.out != oracle.greedy(tiny.checkpoint(), TEXT, N)[0], "random fusers give another answer"


def test_some_gates_of_the_test_are_open_and_some_closed() -> None:
    w = artefacts.random(declared(tiny.load("tiny-draft")), "0")
    assert {bool(gate > 0) for side in "kv" for gate in w[f"{side}.gate"]} == {True, False}


def test_the_last_layers_go_together() -> None:
    assert layer_map(4, 2) == [0, 0, 0, 1] and layer_map(2, 4) == [2, 3] and layer_map(3, 3) == [0, 1, 2]


# ---- what the card says
def written(path: Path, sharer: Model, change: Mapping[str, float], name: str = "tiny-draft") -> str:
    wanted = declared(sharer, name)
    tensors = artefacts.random(wanted, "0")
    for part, value in change.items():
        tensors |= {key: torch.full_like(t, value) for key, t in tensors.items() if key[2:] == part}
    artefacts.save(path, wanted, tensors, fingerprint(tiny.model()), "by hand")
    return f"c2c:sharer={name},weights={path},piece=16"


@pytest.mark.parametrize("change", [{"gate": -1.0}, {"gate": 1.0, "out": 0.0, "out.bias": 0.0}], ids=["closed", "u=0"])
def test_with_closed_gates_or_without_content_it_is_the_receiver(tmp_path: Path, change: dict[str, float]) -> None:
    knobs = written(tmp_path / "fuser.safetensors", tiny.load("tiny-draft"), change)
    assert [serve(built({"decode": knobs}), TEXT).out] == tiny.plain([TEXT], tiny.greedy(N))
    engine = built({"decode": "c2c:sharer=tiny-draft,gates=closed"})
    assert [serve(engine, TEXT).out] == tiny.plain([TEXT], tiny.greedy(N)) and engine.counters.draft_forwards == 0


def test_the_difference_of_the_same_model_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same weights as a sharer, u = theirs - own, share 1 and open gates all stays as it was: tokens and
    layers are paired right. Set by hand, this is a test of places and nobody's method."""
    monkeypatch.setattr("phasewise.methods.decode._second.same", lambda one, other: False)
    monkeypatch.setattr(module, "added", lambda weights, side, layer, own, other: other - own)
    monkeypatch.setattr(Fuser, "open", lambda self, side, layer: True)
    same = {"decode": "c2c:sharer=tiny,weights=random:0,piece=16"}
    for length in (2, 17, 50):
        assert serve(built(same), TEXT[:length]).out == oracle.greedy(tiny.checkpoint(), TEXT[:length], N)[0]
    other = serve(built(VERBS), TEXT).out
    assert other != oracle.greedy(tiny.checkpoint(), TEXT, N)[0], "another model's rows are not the receiver's"


def test_each_row_is_fused_by_itself() -> None:
    base, small = tiny.model(), tiny.load("tiny-draft")
    fuser = Fuser(base, small, artefacts.random(declared(small), "0"))
    gen = torch.Generator().manual_seed(0)
    own, other = (
        [(torch.randn(2, 20, 12, generator=gen), torch.randn(2, 20, 12, generator=gen)) for _ in range(layers)]
        for layers in (4, 2)
    )
    whole = fuse([fuser], own, [other])
    halves = [fuse([fuser], [(k[:, s], v[:, s]) for k, v in own], [[(k[:, s], v[:, s]) for k, v in other]])
              for s in (slice(0, 7), slice(7, 20))]  # fmt: skip
    for layer, (k, v) in enumerate(whole):
        torch.testing.assert_close(torch.cat([half[layer][0] for half in halves], 1), k)
        torch.testing.assert_close(torch.cat([half[layer][1] for half in halves], 1), v)


@pytest.mark.parametrize("length", [2, 17, 18, 200])
def test_both_read_the_prompt_once(length: int) -> None:
    (prompt,), engine = tiny.prompts(length), built()
    request = serve(engine, prompt, tiny.greedy(1))
    runtime: Any = engine.parts.phases[0].decode
    assert engine.counters.prompt_rows == length and runtime.readers[0].companion.own.rows == length - 1
    assert request.recalled == engine.counters.recalled == length - 1
    assert engine.counters.draft_forwards == -(-(length - 1) // 16)


# ---- who else is there
def test_where_there_is_little_room_requests_make_way() -> None:
    texts = tiny.prompts(90, 70, 100, 80, seed=2)
    alone = [serve(built(), text).out for text in texts]
    runtime = built().recipes[""]
    engine = built(VERBS | {"schedule": "sarathi:budget=24"}, kv_bytes=int(2.2 * runtime.need(112 + runtime.margin)))
    assert tiny.outs(tiny.run(engine, texts, tiny.greedy(N))) == alone


@pytest.mark.parametrize("attend", ["dense", "hydragen"])
def test_prefixes_are_shared_as_they_were_computed(attend: str) -> None:
    """With whoever computes prompts plainly, both ways; never as they were fused, and nobody decodes over them."""
    plain, want = {"attend": attend}, serve(built(), TEXT).out
    engine = built(VERBS | plain)
    for _ in range(2):
        assert serve(engine, TEXT).out == want
        engine.forget_prefixes()
    requests = [Request(TEXT, tiny.greedy(N)) for _ in range(3)]
    engine.add(requests[0])
    while not requests[0].n_out:
        engine.step()
    hits = engine.counters.prefix_hits
    for request in requests[1:]:
        engine.add(request)
    tiny.finish(engine, requests)
    assert tiny.outs(requests) == [want] * 3
    assert engine.counters.prefix_hits - hits == 2 * 32, "whole blocks of what was computed"


def test_recipes_meet_in_prefixes_and_not_in_rows() -> None:
    from tests.laws import mixed

    placed: Any = mixed.build({"fused": VERBS}, {})
    first = Request(TEXT, tiny.greedy(N), recipe="fused")
    placed.add(first)
    while first.left is None:
        placed.step()
    hits = placed.counters.prefix_hits
    second = Request(TEXT, tiny.greedy(N))
    placed.add(second)
    tiny.finish(placed, [second])
    assert placed.counters.prefix_hits - hits == 32
    assert [second.out] == tiny.plain([TEXT], tiny.greedy(N)) and first.out == serve(built(), TEXT).out


def test_what_the_sharer_held_is_given_back_once_rows_are_fused() -> None:
    engine = built(prefix_cache=False)
    request = Request(TEXT, tiny.greedy(N))
    engine.add(request)
    while not request.n_out:
        engine.step()
    assert request.kv is not None and engine.kv_bytes == request.kv.bytes and not request.state
    engine.cancel(request)
    assert engine.kv_bytes == 0 and engine.store.left(request.id) is None


def test_a_request_that_is_dropped_on_the_way_leaves_nothing() -> None:
    engine = built(VERBS | {"schedule": "sarathi:budget=7"}, prefix_cache=False)
    for steps in range(1, 9):
        request = Request(TEXT, tiny.greedy(N))
        engine.add(request)
        for _ in range(steps):
            engine.step()
        engine.cancel(request)
        assert engine.kv_bytes == 0


@pytest.mark.parametrize(("verbs", "again"), [(VERBS, False), ({}, True)], ids=["c2c", "plain"])
def test_whoever_takes_fused_rows_over_may_not_compute_some_of_them_again(verbs: dict[str, str], again: bool) -> None:
    """A wire that sends the first rows alone would have the others computed, and not fused."""
    engine = built(verbs)
    request = Request(TEXT, tiny.greedy(N))
    engine.add(request)
    while not request.n_out:
        engine.step()
    assert handoff._origin(request, False).may_stop is again
    engine.cancel(request)


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
def test_in_bfloat16_all_steps_are_native_and_mates_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.watched import passes

    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    small = Model.load(tiny.checkpoint(hidden=64, layers=2, seed=1), dtype=torch.bfloat16)
    monkeypatch.setattr(tiny, "load", lambda name: small)
    outs = []
    for others in ([], tiny.prompts(33, 50)):
        engine = built(of=model)
        made = passes(monkeypatch)
        requests = [Request(text, tiny.greedy(N)) for text in (TEXT, *others)]
        for request in requests:
            engine.add(request)
        tiny.finish(engine, requests)
        outs.append(requests[0].out)
        assert made and all(each.whole for each in made)
    assert outs[0] == outs[1]


def test_controls_fuse_as_much_and_something_else() -> None:
    method, outs = C2C("tiny-draft", weights="random:0", piece=16), []
    for decode in (method, PermutedSharer(method), Reversed(method)):
        engine = Builder(tiny.model(), {**parse({}), "decode": decode}, Limits(64 << 20), load=tiny.load).build()
        request = serve(engine, TEXT)
        assert request.recalled == len(TEXT) - 1
        outs.append(tuple(request.out))
    assert len({*outs, tuple(oracle.greedy(tiny.checkpoint(), TEXT, N)[0])}) == 4


# ---- what is refused
@pytest.mark.parametrize(("knobs", "says"), [
    ({"width": 0}, "width=0 must be at least 1"), ({"piece": 0}, "piece=0 must be at least 1"),
    ({"gates": "ajar"}, "gates=ajar: choose learned or closed"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_fix(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"c2c: {says}"):
        C2C(**knobs)


def test_weights_that_are_missing_or_another_pairs_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train artefact decode.c2c:sharer=tiny-draft,width=48 --model .*gates=closed"):
        built({"decode": "c2c:sharer=tiny-draft"})
    knobs = written(tmp_path / "other.safetensors", tiny.model(layers=2, seed=7), {})
    with pytest.raises(UserError, match="was trained with another second model"):
        built({"decode": knobs})


def test_the_model_itself_is_refused() -> None:
    with pytest.raises(UserError, match="c2c: sharer 'tiny' is the model itself: choose another one"):
        built({"decode": "c2c:sharer=tiny,weights=random:0"})


def test_who_has_to_see_prompts_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="c2c takes rows of prompts from elsewhere, and evict snapkv is not shown"):
        built(VERBS | {"evict": "snapkv"})


def test_scores_of_a_prompt_are_the_receivers_own() -> None:
    params = Params(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    mine, plain = (serve(built(verbs), TEXT, params) for verbs in (VERBS, {}))
    assert mine.scores.keys() == plain.scores.keys()
    for position in range(1, len(TEXT)):
        assert mine.scores[position].logprob == pytest.approx(plain.scores[position].logprob, abs=1e-4)
