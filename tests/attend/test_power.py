"""attend.power: the mask is its definition, reads are really fewer, and information gets around in log2 steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.attend.dense import Dense
from phasewise.methods.attend.power import Power
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.step.read import Read
from phasewise.verbs.host import Host
from tests import oracle, seeds, tiny
from tests.asking import Asking
from tests.kv.harness import Masked, Uneven, Walk, cuts, sliding, walk
from tests.merged import merged

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
TOKENS, OTHER = tiny.prompts(110)[0], tiny.prompts(40, seed=9)[0]
LAYERS, HEADS, DIM, N = 4, 2, 12, 20  # of the tiny model, in float32
TIGHT: dict[str, Any] = {"block": 3, "window": 2, "sinks": 1}
KNOBS: list[dict[str, Any]] = [
    TIGHT, {"block": 1, "window": 1, "sinks": 0}, {"block": 4, "window": 3, "sinks": 2},
    {"block": 4, "window": 4, "sinks": 1, "far": "none"},
]  # fmt: skip


def power(of: Model | None = None, **knobs: Any) -> Any:
    host = Host(of or tiny.model(), None, Counters(), None, None)  # type: ignore[arg-type]
    return Power(**({"weights": "none"} | knobs)).bind(host)


def spelled(weights: str = "none", **more: Any) -> dict[str, str]:
    return {"attend": "power:" + ",".join(f"{k}={v}" for k, v in (TIGHT | more | {"weights": weights}).items())}


def sees(block: int, window: int, sinks: int, q: int, k: int, far: str = "powers") -> bool:
    """One row and another before it, by the book."""
    i, j = q // block, k // block
    return j < sinks or i - j < window or (far == "powers" and i - j in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])


class Slow(Asking):
    """Every row asks of every row."""

    def __init__(self, **knobs: Any) -> None:
        self.knobs = knobs

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self.one(read) for read in reads]

    def one(self, read: Read) -> Tensor:
        heads, moved = read.part.size[0], None if read.view is None else read.view.moved
        select = torch.zeros(heads, read.q.shape[0], read.part.size[1], dtype=torch.bool)
        for head, rows in enumerate(read.part.positions.expand(heads, -1).tolist()):
            for r, at in enumerate(read.q_positions.tolist()):
                for slot, row in enumerate(rows):
                    near = moved is not None and slot in moved[0].tolist() and int(moved[1][r]) > 0
                    select[head, r, slot] = near or (row <= at and sees(**self.knobs, q=at, k=row))
        return read.attend(select)


# ---- the mask
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_the_mask_is_its_definition(knobs: dict[str, Any]) -> None:
    method, n = Power(**knobs), 300
    every = torch.arange(n)
    found = method.seen(every[:, None], every[None]).tril()
    assert found.tolist() == [[k <= q and sees(**knobs, q=q, k=k) for k in range(n)] for q in range(n)]
    for q in range(n):
        blocks = method.blocks(q // knobs["block"])
        assert blocks == sorted(set(blocks)) and blocks[-1] == q // knobs["block"]
        listed = [k for b in blocks for k in range(b * knobs["block"], (b + 1) * knobs["block"]) if k <= q]
        assert listed == found[q].nonzero()[:, 0].tolist()
    hidden = [q for q in range(n) if not bool(found[q, : q + 1].all())]
    assert method.clear == hidden[0] and hidden == list(range(hidden[0], n))


def reach(mask: Tensor, layers: int) -> Tensor:
    """Who can hear of whom through so many layers, by brute force."""
    found = torch.eye(len(mask), dtype=torch.bool)
    for _ in range(layers):
        found = (found.float() @ mask.float()) > 0
    return found


def test_information_reaches_every_row_in_log2_steps_and_a_window_of_the_same_degree_does_not() -> None:
    n, every = 256, torch.arange(256)
    method = Power(block=1, window=1, sinks=0)
    mask = method.seen(every[:, None], every[None]).tril()
    degree = int(mask.sum(1).max())
    assert degree == 9, "itself, 1, 2, 4 .. 128: 1 + log2 n"
    distance = every[:, None] - every[None]
    window = (distance >= 0) & (distance < degree)
    for layers in range(1, 9):
        near = (distance >= 0) & (distance < 1 << layers)
        found = reach(mask, layers)
        assert bool(found[near].all()), f"all distances below 2^{layers}"
        hops = torch.tensor([int(d).bit_count() for d in range(n)])
        assert torch.equal(found, (distance >= 0) & (hops[distance.clamp_min(0)] <= layers))
        assert torch.equal(reach(window, layers), (distance >= 0) & (distance <= layers * (degree - 1)))
    assert bool(reach(mask, 8).eq(distance >= 0).all()) and not bool(reach(window, 8)[-1].all())


@pytest.mark.parametrize(("distance", "layers"), [(8, 1), (15, 4), (12, 2), (11, 3)])
def test_rows_of_a_model_hear_of_a_token_as_many_blocks_away_as_layers_allow(distance: int, layers: int) -> None:
    """A token changes a row so many blocks behind it through as many layers as the distance has ones, and no fewer."""
    knobs, at = {"block": 3, "window": 1, "sinks": 0}, 3 * distance + 1
    text = TOKENS[: at + 1]
    other = [text[0] + 1 if text[0] < 60 else text[0] - 1, *text[1:]]
    for deep in range(1, layers + 1):
        model = tiny.model(layers=deep)
        rows = [walk(model, each[:1], [each[1:]], attend=power(model, **knobs))[-1] for each in (text, other)]
        assert bool((rows[0] != rows[1]).any()) is (deep == layers)


# ---- what is read
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "streaming": lambda: {"evict": Streaming(6, 43).bind(None)},  # type: ignore[arg-type]
    "streaming, text": lambda: {"evict": Streaming(6, 43, "text").bind(None)},  # type: ignore[arg-type]
    "snapkv": lambda: {"evict": SnapKV(keep=0.5, window=5).bind(Host(tiny.model(), None, None, None, None))},  # type: ignore[arg-type]
    "heads that keep other rows": lambda: {"evict": Uneven([[range(0, 70, 2), [*range(34), 69]]] * 4)},
    "heads that keep more rows": lambda: {"evict": Uneven([[range(1, 70, 2), [*range(50), 68, 69]]] * 4)},
    "int8": lambda: {"format": Int8().format()},
}


@pytest.mark.parametrize(
    ("knobs", "case"),
    seeds.params([(TIGHT, case) for case in CASES] + [(each, "plain") for each in KNOBS[1:]], 1, "power",
                 always=[(TIGHT, "plain")]), ids=str,
)  # fmt: skip
def test_equals_the_mask_over_everything(knobs: dict[str, int], case: str) -> None:
    """Single rows, slices, and a whole replay, against rows chosen one by one."""

    def started(attend: Any) -> Walk:
        one = Walk(tiny.model(), TOKENS[:70], attend=attend, **CASES[case]())
        one.feed(TOKENS[:70])
        return one

    truth = started(Slow(**knobs))
    want = torch.cat([truth.feed([token]) for token in TOKENS[70:]])
    for sizes in ([1], [2, 7, 1], [40]):
        one = started(power(**knobs))
        got = torch.cat([one.feed(piece) for piece in cuts(TOKENS[70:], sizes)])
        if case == "int8":  # a sum that is off by 1e-7 makes another level of some number, which later rows read
            assert float((got - want).abs().mean()) < 0.02
        else:
            torch.testing.assert_close(got, want, **CLOSE)
    assert float((started(None).feed(TOKENS[70:]) - want).abs().mean()) > 0.2, "the mask matters, or this tests little"


def test_prompts_are_under_the_mask_as_well() -> None:
    placed = tiny.engine({**spelled(), "schedule": "sarathi:budget=17"})
    (out,) = tiny.outs(tiny.run(placed, [TOKENS], tiny.greedy(8)))
    truth = Masked(lambda layer, head, q, k: sees(**TIGHT, q=q, k=k))
    rows = walk(tiny.model(), [*TOKENS, *out[:-1]], [], evict=truth)
    assert out == rows[len(TOKENS) - 1 :].argmax(-1).tolist()
    assert out != oracle.greedy(tiny.checkpoint(), TOKENS, 8)[0]


def test_windows_of_the_model() -> None:
    model = sliding(17, 4)
    want = walk(model, TOKENS[:1], cuts(TOKENS[1:], [1]), attend=Slow(**TIGHT))
    for sizes in ([6, 1, 13], [109]):
        got = walk(model, TOKENS[:1], cuts(TOKENS[1:], sizes), attend=power(model, **TIGHT))
        torch.testing.assert_close(got, want, **CLOSE)


def test_draft_trees_equal_their_paths() -> None:
    def started() -> Walk:
        one = Walk(tiny.model(), TOKENS[:1], attend=power(**TIGHT))
        one.feed(TOKENS[:1])
        one.feed(TOKENS[1:80])
        return one

    tree, parents = TOKENS[80:81], [-1]
    for depth in range(1, 9):
        tree = [*tree, TOKENS[80 + depth], OTHER[depth]]
        parents = [*parents, 0 if depth == 1 else len(parents) - 2, 0 if depth == 1 else len(parents) - 1]
    one = started()
    logits = one.try_(tree, parents)
    for leaf in (len(tree) - 2, len(tree) - 1):
        path, node = [], leaf
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        alone, taken = started(), started()
        torch.testing.assert_close(logits[path], torch.cat([alone.feed([tree[node]]) for node in path]), **CLOSE)
        taken.try_(tree, parents)
        taken.commit(tree, path)
        torch.testing.assert_close(taken.feed(OTHER[:5]), alone.feed(OTHER[:5]), **CLOSE)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_bytes_read_are_the_rows_of_the_list(knobs: dict[str, int]) -> None:
    """Of every layer the visible blocks, from the tensors that are read; a slice of a prompt reads every row once."""
    one, row = Walk(tiny.model(), TOKENS[:1], attend=power(**knobs)), 2 * HEADS * DIM * 4
    one.feed(TOKENS[:1])
    one.feed(TOKENS[1:60])
    assert one.counters.kv_bytes_read == LAYERS * row * (1 + 60)
    for at, token in enumerate(TOKENS[60:], 60):
        before = one.counters.kv_bytes_read
        one.feed([token])
        rows = sum(sees(**knobs, q=at, k=k) for k in range(at + 1))
        assert one.counters.kv_bytes_read - before == LAYERS * row * rows < LAYERS * row * (at + 1)
        blocks = knobs["sinks"] + knobs["window"] + (at // knobs["block"]).bit_length()
        assert rows <= blocks * knobs["block"], "a logarithm of what there is"


# ---- weights of its own, and others beside it
def test_all_rows_run_with_its_weights(tmp_path: Path) -> None:
    """Prompts and answers: as a model with the low-rank weights merged in, under the mask."""
    wanted = Power(**TIGHT).artefact(tiny.model().config)
    tuned = merged(tiny.checkpoint(), tmp_path / "merged", wanted, 4)
    prompts = tiny.prompts(60, 7)
    placed = tiny.engine({**spelled("random:4"), "schedule": "sarathi:budget=16"})
    got = tiny.outs(tiny.run(placed, prompts, tiny.greedy(N)))
    truth = Masked(lambda layer, head, q, k: sees(**TIGHT, q=q, k=k))
    for prompt, out in zip(prompts, got):
        rows = walk(tuned, [*prompt, *out[:-1]], [], evict=truth)
        assert out == rows[len(prompt) - 1 :].argmax(-1).tolist()
    assert got != tiny.outs(tiny.run(tiny.engine(spelled()), prompts, tiny.greedy(N)))


def test_a_window_of_the_whole_context_is_the_model_itself() -> None:
    assert isinstance(power(window=1 << 30, weights="auto"), Dense)
    assert isinstance(power(block=1024, weights="auto"), Dense)
    assert not isinstance(power(), Dense)


@pytest.mark.parametrize(("knob", "value"), [("block", 0), ("window", 0), ("sinks", -1)])
def test_bad_knobs_are_named_with_the_bound(knob: str, value: int) -> None:
    with pytest.raises(UserError, match=f"power: {knob}={value} must be at least {value + 1}"):
        Power(**{knob: value})


def test_untrained_models_are_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"phasewise train artefact attend.power:block=3,window=2,sinks=1 .*none"):
        tiny.engine(spelled("auto"))


def test_two_methods_with_weights_are_refused() -> None:
    longgen = {"evict": "longgen:sinks=2,window=9,weights=random:0"}
    with pytest.raises(UserError, match="attend power and evict longgen both bring low-rank weights"):
        tiny.engine({**spelled("random:0"), **longgen})
    tiny.engine({**spelled(), **longgen})
