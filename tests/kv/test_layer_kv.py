"""Random lives of a KV cache, held against plain lists of rows: values, positions, and every byte of the budget."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phasewise.kv.buffer import Ledger, rounded
from phasewise.kv.cache import KV
from phasewise.kv.format import KVShape, Raw
from phasewise.kv.layer_kv import LayerKV
from phasewise.request.counters import Counters
from tests.step.plain import DIM, HEADS, PlainLayer, Row, assert_same, tensors

LAYERS = 2


def wanted(end: int) -> int:
    """What a method keeps beside rows whose positions lie below `end`: 24 bytes for every four of them."""
    return 24 * (end // 4)


@dataclass
class Notes:
    bytes: int

    def fork(self) -> Notes:
        return Notes(self.bytes)


class Branch:
    """A KV and its plain twin."""

    def __init__(self, kv: KV, plain: list[PlainLayer]) -> None:
        self.kv, self.plain = kv, plain

    @property
    def next(self) -> int:
        rows = [row.position for layer in self.plain for head in layer.heads for row in head]
        return max(rows, default=-1) + 1


class Lives(RuleBasedStateMachine):
    """Up to three forks of one KV live, grow, shrink and die."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.counters = Ledger(1 << 40), Counters()
        self.marks = itertools.count(1)
        self.branches = [Branch(self.empty(), [PlainLayer() for _ in range(LAYERS)])]

    def empty(self) -> KV:
        shape = KVShape(HEADS, DIM, torch.float32)
        both = ((None, HEADS), (wanted, 0))  # whose rows may go, and of whom nobody has said so
        return KV([LayerKV(shape, Raw(), self.ledger, 64, *each) for each in both], self.counters)

    def pick(self, data: st.DataObject) -> Branch:
        return data.draw(st.sampled_from(self.branches))

    def rows(self, positions: list[int]) -> list[Row]:
        return [Row(position, float(next(self.marks))) for position in positions]

    # ---- steps
    @rule(data=st.data(), n=st.integers(1, 90))
    def step(self, data: st.DataObject, n: int) -> None:
        """A causal span of which a first part stays."""
        branch = self.pick(data)
        rows = self.rows(list(range(branch.next, branch.next + n)))
        self.append(data, branch, rows)
        self.commit(branch, data.draw(st.integers(0, n)))

    @rule(data=st.data(), parents=st.lists(st.integers(-1, 5), min_size=1, max_size=7))
    def tree(self, data: st.DataObject, parents: list[int]) -> None:
        """A draft tree of which one path stays."""
        branch = self.pick(data)
        parents = [-1] + [min(max(parent, 0), i) for i, parent in enumerate(parents)]
        depth: list[int] = []
        for parent in parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        self.append(data, branch, self.rows([branch.next + d for d in depth]))
        node, path = data.draw(st.integers(0, len(parents) - 1)), []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        self.commit(branch, path)

    def append(self, data: st.DataObject, branch: Branch, rows: list[Row]) -> None:
        before, growth = self.ledger.used, branch.kv.growth(len(rows))
        branch.kv.reserve(len(rows))
        assert self.ledger.used - before == growth, "reserve takes what growth said"
        assert branch.kv.growth(len(rows)) == 0
        for layer, plain in zip(branch.kv.layers, branch.plain):
            if plain.freed:
                continue
            assert layer.beside.refs == 1, "who writes rows may write beside them"
            places = list(range(len(rows)))
            if data.draw(st.booleans()):  # some rows skip this layer, or they come in two pieces
                places = sorted(data.draw(st.sets(st.sampled_from(places))))
            cut = data.draw(st.integers(0, len(places)))
            for piece in (places[:cut], places[cut:]):
                if piece:
                    whole = piece == list(range(len(rows)))
                    k, v = tensors([rows[i] for i in piece])
                    layer.append(k, v, [rows[i].position for i in piece], None if whole else piece)
            plain.fresh = [(i, rows[i]) for i in places]
            assert_same(layer, plain)

    def commit(self, branch: Branch, keep: Any) -> None:
        before = [layer.bytes for layer in branch.kv.layers]
        branch.kv.commit(keep)
        for layer, held in zip(branch.kv.layers, before):
            assert layer.bytes == held or not layer.wide, "positions have room that was booked with the rows"
        for plain in branch.plain:
            plain.commit(keep)

    @rule(data=st.data(), key=st.sampled_from("ab"), n=st.integers(0, 300))
    def derive(self, data: st.DataObject, key: str, n: int) -> None:
        """A step in which something is derived; as much as was announced takes no bytes."""
        branch = self.pick(data)
        self.append(data, branch, self.rows([branch.next]))
        for layer, plain in zip(branch.kv.layers, branch.plain):
            if not plain.freed:
                before, others = self.ledger.used, sum(v.bytes for k, v in layer.derived.items() if k != key)
                room = layer.beside.booked - others
                layer.beside.keep(key, Notes(n))
                assert layer.derived[key].bytes == n and self.ledger.used - before == max(0, n - room)
        self.commit(branch, 1)

    # ---- between steps
    @rule(data=st.data(), back=st.integers(0, 40))
    def drop_last(self, data: st.DataObject, back: int) -> None:
        branch = self.pick(data)
        position = max(branch.next - back, 0)
        branch.kv.drop_last(position)
        for plain in branch.plain:
            plain.heads = [[row for row in head if row.position < position] for head in plain.heads]

    @rule(data=st.data(), how=st.sampled_from(["together", "equal", "ragged"]), room=st.integers(0, 70))
    def keep(self, data: st.DataObject, how: str, room: int) -> None:
        branch = self.pick(data)
        i = data.draw(st.integers(0, LAYERS - 1))
        plain = branch.plain[i]
        sizes = [len(head) for head in plain.heads]
        if plain.freed or (how != "ragged" and len(set(sizes)) > 1):
            return

        def some(n: int, count: int | None = None) -> torch.Tensor:
            size = {} if count is None else {"min_size": count, "max_size": count}
            slots = data.draw(st.sets(st.integers(0, n - 1), **size)) if n else set()
            return torch.tensor(sorted(slots), dtype=torch.int64)

        if how == "together":
            chosen = [some(sizes[0])] * HEADS
            index: Any = chosen[0]
        elif how == "equal":
            count = data.draw(st.integers(0, sizes[0]))
            chosen = [some(size, count) for size in sizes]
            index = torch.stack(chosen)
        else:
            index = chosen = [some(size) for size in sizes]
        layer = branch.kv.layers[i]
        shared = any(slab.buffer.refs > 1 for slab in layer.slabs)
        before, moved = self.ledger.used, self.counters.kv_bytes_moved
        branch.kv.keep(i, index, room)
        plain.heads = [[head[slot] for slot in slots.tolist()] for head, slots in zip(plain.heads, chosen)]
        assert shared or not layer.wide or self.ledger.used <= before, "giving rows up takes no memory"
        assert self.counters.kv_bytes_moved - moved == layer.live_bytes
        assert layer.derived == {}

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        branch = self.pick(data)
        i = data.draw(st.integers(0, LAYERS - 1))
        branch.kv.free(i)
        branch.plain[i] = PlainLayer(freed=True)

    @precondition(lambda self: len(self.branches) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        branch = self.pick(data)
        before = self.ledger.used
        self.branches.append(Branch(branch.kv.fork(), [plain.twin() for plain in branch.plain]))
        assert self.ledger.used == before, "a fork is free until someone writes"

    @precondition(lambda self: len(self.branches) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        branch = self.pick(data)
        self.branches.remove(branch)
        branch.kv.close()

    @rule(data=st.data())
    def hand_off(self, data: st.DataObject) -> None:
        """Dumped, closed, and loaded into a new KV."""
        branch = self.pick(data)
        dumped = branch.kv.dump()
        branch.kv.close()
        branch.kv = self.empty()
        branch.kv.load(dumped)

    # ---- what always holds
    @invariant()
    def same_rows(self) -> None:
        for branch in self.branches:
            for layer, plain in zip(branch.kv.layers, branch.plain):
                assert_same(layer, plain)

    @invariant()
    def every_byte_is_counted(self) -> None:
        buffers = {id(s.buffer): s.buffer for b in self.branches for layer in b.kv.layers for s in layer.slabs}
        beside = {id(layer.beside): layer.beside for branch in self.branches for layer in branch.kv.layers}
        assert all(each.bytes <= each.booked for each in beside.values())
        booked = sum(each.booked for each in beside.values())
        tensors = [each for buffer in buffers.values() for each in (*buffer.planes, buffer.positions)]
        assert self.ledger.used == booked + sum(each.nbytes for each in tensors)
        for branch in self.branches:
            assert branch.kv.live_bytes <= branch.kv.bytes

    def teardown(self) -> None:
        for branch in self.branches:
            branch.kv.close()
        assert self.ledger.used == 0


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def test_heads_of_equal_length_share_a_slab() -> None:
    """And each of them has the rows listed for it, not those of another head of the slab."""
    ledger, rows = Ledger(1 << 30), [Row(i, float(i)) for i in range(10)]
    layer, plain = LayerKV(KVShape(HEADS, DIM, torch.float32), Raw(), ledger, 64), PlainLayer()
    layer.append(*tensors(rows), range(10))
    layer.commit(10)
    layer.keep([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])])
    assert [s.heads.tolist() for s in layer.slabs if s.heads is not None] == [[0, 2], [1]]
    plain.heads = [[rows[1], rows[2]], [rows[3]], [rows[4], rows[5]]]
    assert_same(layer, plain)
    layer.keep([torch.tensor([0]), torch.tensor([0]), torch.tensor([1])])
    assert len(layer.slabs) == 1 and layer.slabs[0].heads is None, "equal again: one slab, one read"
    plain.heads = [[rows[1]], [rows[3]], [rows[5]]]
    assert_same(layer, plain)


def test_rows_past_the_reserve_do_not_fit() -> None:
    """The spare of a KV is never more than any of its layers can take."""
    ledger = Ledger(1 << 30)
    shape = KVShape(HEADS, DIM, torch.float32)
    kv = KV([LayerKV(shape, Raw(), ledger, 64), LayerKV(shape, Raw(), ledger, 128)], Counters())
    assert kv.growth(64) == 0 and kv.growth(65) == 64 * HEADS * DIM * 2 * 4


def test_a_long_text_is_moved_no_more_often_than_a_short_one() -> None:
    """Room grows by a sixteenth: a row costs at most 32 copies of one, and nothing larger is booked."""
    ledger = Ledger(1 << 30)
    layer = LayerKV(KVShape(1, 1, torch.float32), Raw(), ledger, 64)
    bytes_of_row, moved, last = 8, 0, 0
    for n in range(20_000):
        moved += layer.reserve(1)
        cap = layer.slabs[0].buffer.cap
        assert cap == rounded(cap) == rounded(n + 1) and n < cap <= max(n + 64, (n + 1) * 17 / 16 + 1)
        assert ledger.used == cap * bytes_of_row and cap >= last
        layer.append(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), [n])
        layer.commit(1)
        assert moved <= 32 * (n + 1) * bytes_of_row
        last = cap
    assert moved > 16 * 20_000 * bytes_of_row / 4, "it has moved"
