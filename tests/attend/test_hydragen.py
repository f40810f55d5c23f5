"""attend.hydragen: dense attention's results from fewer rows, whoever shares what with whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.kv.prefix import Node
from phasewise.methods.attend.dense import Dense
from phasewise.methods.attend.hydragen import Hydragen
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.ops.native.spans import Common
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.fused import _commons
from phasewise.step.plan import SharedPrefix
from phasewise.step.shared import in_common
from phasewise.verbs.place import Placed
from tests import oracle, tiny

ON = {"attend": "hydragen"}
SHARED, OTHER = tiny.prompts(200, 150, seed=3)
EARLY = {"attend": "hydragen:rows=32"}


def ends(*lengths: int, seed: int = 5) -> list[list[int]]:
    return tiny.prompts(*lengths, seed=seed)


def half(**options: Any) -> Model:
    return Model.load(tiny.checkpoint(**options), dtype=torch.bfloat16)


# ---- who shares what
ROOT = Node(b"", None, [], 0, 0)


def branch(names: str) -> list[Node]:
    """Nodes of 32 rows from the root on, one for each letter; the same letters give the same nodes."""
    path, node = [], ROOT
    for name in names:
        key = name.encode()
        node = node.children.setdefault(key, Node(key, node, [], 32, 0))
        path.append(node)
    return path


def found(method: Hydragen, *paths: str) -> list[Common]:
    spans: list[Any] = [SimpleNamespace(kv=SimpleNamespace(nodes=branch(path))) for path in paths]
    return sorted(in_common(spans, SharedPrefix(method.sharers, method.rows)))


def test_levels_follow_the_tree() -> None:
    method = Hydragen(rows=32)
    assert found(method, "abcd", "abcd", "abxy", "", "q") == [
        Common((0, 1), 64, 128, 1),
        Common((0, 1, 2), 0, 64, 0),
    ]
    assert found(method, "abcd", "abce", "xbcd", "xbcd") == [Common((0, 1), 0, 96, 0), Common((2, 3), 0, 128, 0)]
    assert found(method, "abc", "abcdef", "abcdef", "abcdeg") == [
        Common((0, 1, 2, 3), 0, 96, 0),
        Common((1, 2), 160, 192, 2),
        Common((1, 2, 3), 96, 160, 1),
    ]
    assert found(method) == [] and found(method, "abc") == [] and found(method, "abc", "", "xyz") == []


def test_levels_that_do_not_pay_are_left_to_those_above() -> None:
    assert found(Hydragen(), "abcde", "abcde") == [Common((0, 1), 0, 128, 0)]  # whole blocks of 64
    assert found(Hydragen(), "abcde", "abcde", "axxx") == [Common((0, 1), 0, 128, 0)]
    assert found(Hydragen(), "abcde", "abcde", "abxx") == [Common((0, 1), 64, 128, 1), Common((0, 1, 2), 0, 64, 0)]
    assert found(Hydragen(rows=128), "abcde", "abcde", "abxx") == [Common((0, 1), 0, 128, 0)]
    assert found(Hydragen(rows=129), "abcde", "abcde") == []
    assert found(Hydragen(rows=20), "abc", "abcd") == [Common((0, 1), 0, 80, 0)]
    assert found(Hydragen(sharers=3, rows=32), "abcd", "abcd", "abce") == [Common((0, 1, 2), 0, 96, 0)]
    assert found(Hydragen(sharers=4), "abcd", "abcd", "abce") == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", max_size=7), max_size=9), st.integers(2, 4), st.sampled_from([32, 64, 96]))
def test_whatever_the_tree(paths: list[str], sharers: int, rows: int) -> None:
    """Only alike rows are shared; a span's levels join without gaps; with the finest knobs every node is read once."""
    commons = found(Hydragen(sharers, rows), *paths)
    for common in commons:
        assert len(common.members) >= sharers and common.stop - common.start >= rows
        ways = {paths[m][: -(-common.stop // 32)] for m in common.members}
        assert len(ways) == 1 and common.stop <= 32 * len(ways.pop())
    for m in range(len(paths)):
        mine = sorted((c.level, c.start, c.stop) for c in commons if m in c.members)
        assert [level for level, _, _ in mine] == list(range(len(mine)))
        assert [start for _, start, _ in mine] == [0, *(stop for _, _, stop in mine)][: len(mine)]
    if (sharers, rows) == (2, 32):
        alone = 32 * sum(len(path) for path in paths)
        once = 32 * len({path[: i + 1] for path in paths for i in range(len(path))})
        assert alone - sum(common.saved for common in commons) == once


@pytest.mark.parametrize(("knob", "value"), [("sharers", 1), ("rows", 0)])
def test_knobs_that_make_no_sense(knob: str, value: int) -> None:
    with pytest.raises(UserError, match=f"hydragen: {knob}={value} must be at least {value + 1}"):
        Hydragen(**{knob: value})


def test_whole_steps_share_by_method_and_not_under_a_window() -> None:
    """Spans are numbered as in the step; a method shares among its own, trees of any size included; slices of prompts
    read by themselves."""

    def flat(walk: None) -> Any:
        return SimpleNamespace(gaps=False)

    names = ("abcd", "abcd", "abcd", "abcd", "ab", "abcd", "ab")
    paths: list[Any] = [SimpleNamespace(nodes=branch(path), flat=flat) for path in names]
    one, other = Hydragen(), Hydragen(rows=128)
    spans: list[Any] = [
        SimpleNamespace(kv=kv, plan=attend.plan(None), walk=None, rows=rows, sees=sees)
        for kv, attend, (rows, sees) in zip(
            paths, (one, other, Dense(), other, one, one, one),
            [*[(1, None)] * 4, (64, None), (65, None), (65, torch.ones(65, 65).bool())],
        )
    ]  # fmt: skip
    assert sorted(_commons(spans, range(7), 200, [])) == [Common((0, 4, 6), 0, 64, 0), Common((1, 3), 0, 128, 0)]
    assert sorted(_commons(spans, range(7), 200, [200])) == sorted(_commons(spans, range(7), 200, []))
    assert _commons(spans, range(7), 200, [200, 199]) == []


# ---- engines
FAMILY = [SHARED + end for end in ends(3, 20, 41, 8)] + [SHARED[:100] + end for end in ends(30, 5, seed=6)]
FAMILY += ends(60, 33)


def outs(verbs: dict[str, str], prompts: list[list[int]] = FAMILY, of: Model | None = None) -> list[list[int]]:
    placed = tiny.engine(verbs, of=of)
    tiny.outs([primed(placed)])
    return tiny.outs(tiny.run(placed, prompts, tiny.greedy(20)))


def primed(placed: Placed) -> Request:
    """The shared beginning, asked for and answered before."""
    request = Request(SHARED, tiny.greedy(1))
    placed.add(request)
    while request.left is None:
        placed.step()
    return request


def test_tokens_are_greedys() -> None:
    for prompt, got in zip(FAMILY, outs(ON)):
        assert got == oracle.greedy(tiny.checkpoint(), prompt, 20)[0]


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
def test_in_bfloat16_too() -> None:
    model = half(hidden=64)
    want = outs({}, of=model)
    assert outs(ON, of=model) == want
    assert [outs(ON, [prompt], of=model)[0] for prompt in FAMILY] == want


def test_requests_come_and_go() -> None:
    want = dict(zip(map(tuple, FAMILY), outs({})))
    for seed in range(3):
        placed, gen = tiny.engine(EARLY), torch.Generator().manual_seed(seed)
        primed(placed)
        waiting = [Request(prompt, tiny.greedy(20)) for prompt in FAMILY + FAMILY[:4]]
        there: list[Request] = []
        while waiting or not placed.idle:
            luck = float(torch.rand((), generator=gen))
            if waiting and luck < 0.5:
                there.append(waiting.pop(0))
                placed.add(there[-1])
            elif luck > 0.95 and there:
                placed.cancel(there[int(len(there) * luck)])
            elif luck > 0.9 and placed.running:  # type: ignore[attr-defined]
                placed.room.preempt(placed.running[-1])  # type: ignore[attr-defined]
            placed.step()
        assert sum(r.left is not None and r.left.how == "finished" for r in there) > 6
        for request in there:
            assert request.left is not None and request.left.how in ("finished", "cancelled")
            assert request.out == want[tuple(request.prompt)][: len(request.out)]
        placed.forget_prefixes()
        assert placed.kv_bytes == 0


def test_forks_share_their_prompt() -> None:
    params = Params(max_tokens=12, ignore_eos=True, temperature=0.9, seed=4)
    read, drawn = [], []
    for verbs in ({}, ON):
        placed = tiny.engine(verbs)
        first = Request(SHARED, params)
        family = [first, *(first.sibling(i) for i in (1, 2, 3))]
        for request in family:
            placed.add(request)
        tiny.finish(placed, family)
        drawn.append(tiny.outs(family))
        read.append(placed.counters.kv_bytes_read)
    assert drawn[0] == drawn[1] and len(set(map(tuple, drawn[0]))) > 1
    model = tiny.model().config
    assert read[0] - read[1] == 3 * 192 * 11 * model.layers * 2 * model.head_dim * 4 * model.kv_heads


def test_neutral_reads_what_dense_reads() -> None:
    read = {}
    for attend in ("dense", "hydragen:sharers=1000", "hydragen"):
        placed = tiny.engine({"attend": attend})
        tiny.run(placed, FAMILY, tiny.greedy(8))
        read[attend] = placed.counters.kv_bytes_read
    assert read["dense"] == read["hydragen:sharers=1000"] > 1.5 * read["hydragen"]
