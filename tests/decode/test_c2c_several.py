"""decode.c2c with several sharers: rows against a fusion by hand, orders that change nothing and orders that do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.decode._second import Rows
from phasewise.methods.decode.c2c import C2C, Fuser, fuse
from phasewise.model import artefacts
from phasewise.model.artefacts import fingerprint
from phasewise.model.config import ModelConfig
from phasewise.options import parse
from phasewise.reproduce.systems.c2c import PermutedSharer, Reversed
from phasewise.request.request import Request
from phasewise.train.artefacts import ArtefactJob, decode_c2c
from tests import oracle, seeds, tiny
from tests.decode.test_c2c import TEXT, N, built, fused, serve
from tests.laws import scenario
from tests.skip.test_unified import ByHand

MODES = ("parallel", "sequential")


@cache
def names() -> tuple[str, str, str]:
    """Three sharers of different shapes and weights."""
    return "tiny-draft", str(tiny.checkpoint(layers=3, seed=5)), str(tiny.checkpoint(layers=5, hidden=32, seed=6))


def knobs(sharers: Sequence[str], several: str = "parallel", weights: str = "random:0") -> str:
    return f"c2c:sharer={'+'.join(sharers)},several={several},weights={weights},piece=16"


def declared(name: str) -> artefacts.Artefact:
    sharer = tiny.load(name)
    return C2C(name).artefact(tiny.model().config, sharer.config, fingerprint(sharer))


def written(folder: Path, name: str, gate: float | None = None, seed: str = "0") -> str:
    """A fuser for that sharer in a file, with all gates set if one is given."""
    wanted = declared(name)
    tensors = artefacts.random(wanted, seed)
    if gate is not None:
        tensors |= {key: torch.full_like(t, gate) for key, t in tensors.items() if key[2:] == "gate"}
    path = folder / f"{names().index(name)}-{seed}-{gate}.safetensors"
    artefacts.save(path, wanted, tensors, fingerprint(tiny.model()), "by hand")
    return str(path)


@torch.inference_mode()
def by_hand(prompt: Sequence[int], sharers: Sequence[str], several: str) -> list[int]:
    """All models row by row; what sharers add is added up, or each reads what was made before it."""
    base = tiny.model()
    slow = ByHand(base)
    for at, token in enumerate(prompt[:-1]):
        slow.run(token, at, range(base.config.layers))
    clean = {layer: list(rows) for layer, rows in slow.rows.items()}
    for name in sharers:
        small = tiny.load(name)
        read, w = ByHand(small), artefacts.random(declared(name), "0")
        for at, token in enumerate(prompt[:-1]):
            read.run(token, at, range(small.config.layers))
        for layer, rows in slow.rows.items():
            other = read.rows[max(0, layer - base.config.layers + small.config.layers)]
            for at, pair in enumerate(rows):
                start = pair if several == "sequential" else clean[layer][at]
                more = [fused(w, side, layer, own, theirs) - own for side, own, theirs in zip("kv", start, other[at])]
                rows[at] = (pair[0] + more[0], pair[1] + more[1])
    token, out = prompt[-1], list[int]()
    for i in range(N):
        token = slow.run(token, len(prompt) - 1 + i, range(base.config.layers))
        out.append(token)
    return out


@pytest.mark.parametrize(
    ("several", "length"), seeds.params(product(MODES, [2, 17, 50]), 2, "c2c", always=[(MODES[0], 50)])
)
def test_tokens_are_those_of_rows_fused_by_hand(several: str, length: int) -> None:
    engine = built({"decode": knobs(names(), several)})
    mine = serve(engine, TEXT[:length])
    assert mine.out == by_hand(TEXT[:length], names(), several) and mine.recalled == length - 1
    if length == 50:
        others = [serve(built({"decode": knobs([name])}), TEXT).out for name in names()]
        assert mine.out not in [oracle.greedy(tiny.checkpoint(), TEXT, N)[0], *others], "three are not one, or none"


# ---- orders
def held(sharers: Sequence[str], several: str) -> list[torch.Tensor]:
    """The fused rows of the prompt, as an engine holds them."""
    engine = built({"decode": knobs(sharers, several)})
    request = Request(TEXT, tiny.greedy(N))
    engine.add(request)
    while not request.n_out:
        engine.step()
    assert request.kv is not None and request.kv.approximate
    parts = [layer.read()[0].between(0, len(TEXT) - 1) for layer in request.kv.layers]
    found = [side.clone() for part in parts for side in part]
    engine.cancel(request)
    return found


def test_in_parallel_no_order_of_sharers_changes_a_bit_and_in_sequence_it_does() -> None:
    first, *others = (held(order, "parallel") for order in permutations(names()))
    assert len(others) == 5
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    one, two = (held(order, "sequential") for order in (names(), names()[::-1]))
    assert any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(one, two, strict=True))
    assert any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(one, first, strict=True))


@pytest.mark.parametrize("several", MODES)
def test_rows_are_fused_each_by_itself(several: str) -> None:
    sharers, gen = [tiny.load(name) for name in names()], torch.Generator().manual_seed(0)
    fusers = [Fuser(tiny.model(), sharer, artefacts.random(declared(name), "0"))
              for name, sharer in zip(names(), sharers)]  # fmt: skip
    own, *others = (drawn(model.config, gen) for model in (tiny.model(), *sharers))

    def made(cut: slice) -> Rows:
        mine, *theirs = ([(k[:, cut], v[:, cut]) for k, v in rows] for rows in (own, *others))
        return fuse(fusers, mine, theirs, several == "sequential")

    whole, parts = made(slice(0, 20)), [made(slice(0, 7)), made(slice(7, 20))]
    assert any(not torch.equal(k, own[layer][0]) for layer, (k, _) in enumerate(whole))
    for layer, pair in enumerate(whole):
        for side in (0, 1):
            torch.testing.assert_close(torch.cat([part[layer][side] for part in parts], 1), pair[side])


def drawn(config: ModelConfig, gen: torch.Generator) -> Rows:
    """Twenty rows of each layer."""
    shape = config.kv_heads, 20, config.head_dim
    return [(torch.randn(shape, generator=gen), torch.randn(shape, generator=gen)) for _ in range(config.layers)]


# ---- who adds nothing
@pytest.mark.parametrize("several", MODES)
def test_a_sharer_whose_gates_are_closed_changes_nothing(several: str, tmp_path: Path) -> None:
    one, two, three = names()
    files = [written(tmp_path, name, gate) for name, gate in ((one, None), (two, -1.0), (three, -1.0))]
    want = serve(built({"decode": knobs([one], weights=files[0])}), TEXT).out
    assert [want] != tiny.plain([TEXT], tiny.greedy(N))
    assert serve(built({"decode": knobs([one, two, three], several, "+".join(files))}), TEXT).out == want
    swapped = knobs([three, one, two], several, "+".join([files[2], files[0], files[1]]))
    assert serve(built({"decode": swapped}), TEXT).out == want, "each sharer has its own file"
    closed = [written(tmp_path, name, -1.0) for name in (one, two)]
    assert [serve(built({"decode": knobs([one, two], several, "+".join(closed))}), TEXT).out] == tiny.plain(
        [TEXT], tiny.greedy(N)
    )


# ---- who else is there
@pytest.mark.parametrize("several", MODES)
def test_tokens_are_a_requests_own(several: str) -> None:
    scenario.check({"decode": knobs(names(), several)}, "sarathi:budget=9")


def test_each_sharer_reads_the_prompt_once_and_gives_its_room_back() -> None:
    engine = built({"decode": knobs(names())}, prefix_cache=False)
    request = Request(TEXT, tiny.greedy(N))
    engine.add(request)
    while not request.n_out:
        engine.step()
    runtime: Any = engine.parts.phases[0].decode
    assert [reader.companion.own.rows for reader in runtime.readers] == [len(TEXT) - 1] * 3
    assert engine.counters.draft_forwards == 3 * -(-(len(TEXT) - 1) // 16)
    assert engine.counters.prompt_rows == len(TEXT) and engine.counters.recalled == len(TEXT) - 1
    assert request.kv is not None and engine.kv_bytes == request.kv.bytes and not request.state
    engine.cancel(request)
    assert engine.kv_bytes == 0


def test_controls_fuse_as_much_and_something_else() -> None:
    method, outs = C2C("+".join(names()), weights="random:0", piece=16), []
    for decode in (method, PermutedSharer(method), Reversed(method)):
        engine = Builder(tiny.model(), {**parse({}), "decode": decode}, Limits(64 << 20), load=tiny.load).build()
        request = serve(engine, TEXT)
        assert request.recalled == len(TEXT) - 1
        outs.append(tuple(request.out))
    assert len({*outs}) == 3


# ---- what is refused
@pytest.mark.parametrize(("knobs", "says"), [
    ({"several": "both"}, "several=both: choose parallel or sequential"),
    ({"sharer": "one+one"}, r"sharer=one\+one: name each sharer once, as in one\+two"),
    ({"sharer": "one+"}, r"sharer=one\+: name each sharer once"),
    ({"sharer": "one+two+three", "weights": "a+b"},
     r"weights=a\+b are 2 files for 3 sharers: name one for each, in the order of sharer, or say auto"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_fix(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"c2c: {says}"):
        C2C(**knobs)


def test_the_sharer_without_weights_and_the_one_that_is_the_model_are_named(tmp_path: Path) -> None:
    one, two, _ = names()
    with pytest.raises(UserError, match=f"train artefact decode.c2c:sharer={one},width=48 --model"):
        built({"decode": knobs([one, two], weights="auto")})
    files = "+".join([written(tmp_path, one), written(tmp_path, one, seed="1")])
    with pytest.raises(UserError, match="was trained with another second model"):
        built({"decode": knobs([one, two], weights=files)})
    with pytest.raises(UserError, match="c2c: sharer 'tiny' is the model itself: choose another one"):
        built({"decode": knobs([one, "tiny"])})


def test_a_fuser_is_trained_for_one_sharer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sharer=one\+two: a fuser is trained for one sharer: train one for each"):
        decode_c2c.train(C2C("one+two"), ArtefactJob("pocket", tmp_path))
