"""store.zipcache: classes by a full attention matrix, rows number by number, and bytes by closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.kv.format import KEYS, SIDES, VALUES, BlockCut, KVShape, Raw, form_of
from phasewise.methods.store._classed import Classed
from phasewise.methods.store._grouped import Grouped
from phasewise.methods.store.zipcache import Saliency, ZipCache, probed
from phasewise.model.model import Model
from phasewise.reproduce.shuffled import PermutedClasses
from phasewise.request.request import Request
from phasewise.step.read import Read
from phasewise.verbs.host import Host
from tests import double, oracle, tiny, uncached
from tests.asking import Asking
from tests.kv.harness import Recorder, Walk, cuts, sliding

GAP, HIGH, LOW, UPPER = 8, 4, 2, 4
KNOBS: dict[str, Any] = {"gap": GAP, "high": HIGH, "low": LOW, "important": UPPER / GAP}
STORE = f"zipcache:gap={GAP},important={UPPER / GAP}"
PROMPT, WHOLE = 37, 80
CLOSE = {"atol": 1e-9, "rtol": 0.0}


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding is a step function: see tests/laws/test_kv_methods.py."""
    double.everything(monkeypatch)


def saliency(model: Model | None = None, **knobs: Any) -> Saliency:
    return ZipCache(**(KNOBS | knobs)).bind(host(model or tiny.model()))


def host(model: Model) -> Host:
    return Host(model, None, None, None, None)  # type: ignore[arg-type]


def walk(model: Model, prompt: Sequence[int], **knobs: Any) -> Walk:
    return Walk(model, prompt, evict=saliency(model, **knobs), format=ZipCache(**(KNOBS | knobs)).format())


# ---- the quantiser
def outlying(rows: int = 128, dim: int = 64) -> Tensor:
    """[1, rows, dim] with channels of very different sizes."""
    x = torch.randn(1, rows, dim, generator=torch.Generator().manual_seed(0))
    x[..., 3] *= 30
    x[..., 17] *= 12
    x[..., 40] *= 6
    return x


def error(format: Classed, x: Tensor, marks: Tensor | None = None, plainly: bool = False) -> float:
    shape = KVShape(x.shape[0], x.shape[2], x.dtype)
    settled = [plane[:, None] for plane in format.settle(VALUES, x)]
    if plainly:
        settled = [torch.ones_like(plane) for plane in settled]
    marks = torch.zeros(x.shape[1]) if marks is None else marks
    planes = [*format.seal_ranked(VALUES, x, marks, settled), *settled]
    return float((format.open(VALUES, planes, shape) - x).norm())


@pytest.mark.parametrize("bits", [2, 4])
def test_channels_at_one_scale_are_far_better_than_plain_rows(bits: int) -> None:
    """And about as good as groups of 32 in each channel, which have many more ends."""
    x, format = outlying(), Classed(bits, bits, 32, 16)
    separable, plain = error(format, x), error(format, x, plainly=True)
    by_channel = Grouped(bits, 32, (BlockCut(32), BlockCut(32)), (True, True))
    back = by_channel.open(KEYS, by_channel.seal(KEYS, x), KVShape(1, 64, x.dtype))
    assert plain > 2 * separable
    assert separable < 2 * float((back - x).norm())


def test_rows_with_larger_marks_get_more_bits() -> None:
    x, format = torch.randn(2, 24, 12, generator=torch.Generator().manual_seed(1)), Classed(8, 2, 8, 2)
    marks = torch.rand(24, generator=torch.Generator().manual_seed(2))
    settled = [plane[:, None] for plane in format.settle(KEYS, x)]
    back = format.open(KEYS, [*format.seal_ranked(KEYS, x, marks, settled), *settled], KVShape(2, 12, x.dtype))
    off = (back - x).norm(dim=-1).sum(0)
    upper = marks.topk(6).indices.tolist()
    assert sorted(off.topk(6, largest=False).indices.tolist()) == sorted(upper), "wherever they lie, six of 24"


@pytest.mark.parametrize("keys", ["row", "channel"])
@pytest.mark.parametrize(("gap", "important"), [(5, 0.6), (100, 0.0), (100, 1.0)])
def test_mean_bits_from_tensors(gap: int, important: float, keys: str) -> None:
    """Of packed rows: those of the classes, two ends for each row, a bit for its class; and one number per channel. Of
    keys by channel: two ends for each channel of either class that has rows."""
    heads, dim, blocks = 2, 64, 3
    shape, upper = KVShape(heads, dim, torch.bfloat16), round(important * gap)
    format = ZipCache(gap=gap, important=important, keys=keys).format()  # type: ignore[arg-type]
    assert isinstance(format, Classed)
    x = torch.randn(heads, blocks * gap, dim)
    for side in SIDES:
        settled = [plane[:, None] for plane in format.settle(side, x)]
        planes = format.seal_ranked(side, x, torch.rand(blocks * gap), settled)
        kinds = format.kinds(side, form_of(format, shape))
        assert [(tuple(p.shape[2:]), p.dtype) for p in planes] == [(tuple(tail), dtype) for tail, dtype in kinds]
        bits = 8 * sum(plane.nbytes for plane in planes) / (blocks * gap * heads * dim)
        mean = upper / gap * 4 + (1 - upper / gap) * 2
        by_channel = side == KEYS and keys == "channel"
        ends = 32 / gap * (2 if 0 < upper < gap else 1) if by_channel else 32 / (heads * dim)
        assert bits == pytest.approx(mean + ends + 8 * -(-gap // 8) / (gap * heads * dim), rel=1e-12)
        assert 8 * sum(plane.nbytes for plane in settled) == (0 if by_channel else 16 * heads * dim)


def test_keys_by_channel_are_off_by_half_a_step_of_their_channel_in_a_class() -> None:
    """Worked out number by number: the ends of a channel are those of the rows that a block's share of a class holds;
    channels that lie in different places do not spoil one another, as by row they do."""
    x, marks = (
        torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(1)),
        torch.rand(24, generator=torch.Generator().manual_seed(2)),
    )
    x += 10 * torch.randn(64, generator=torch.Generator().manual_seed(3))
    format, shape = ZipCache(gap=8, high=4, low=2, important=0.25).format(), KVShape(1, 64, torch.float32)
    assert isinstance(format, Classed)
    back = format.open(KEYS, format.seal_ranked(KEYS, x, marks, []), shape)
    upper = sorted(marks.topk(6).indices.tolist())
    others = [row for row in range(24) if row not in upper]
    for rows, each, bits in ((upper, 2, 4), (others, 6, 2)):
        for first in range(0, len(rows), each):
            mine = rows[first : first + each]
            low, high = x[0, mine].amin(0), x[0, mine].amax(0)
            room = (high - low) / (2**bits - 1) / 2 + 2e-3 * (low.abs() + high.abs())
            assert ((back[0, mine] - x[0, mine]).abs() <= room).all()
    by_row = replace(format, by_channel=False)
    settled = [plane[:, None] for plane in by_row.settle(KEYS, x)]
    rowwise = by_row.open(KEYS, [*by_row.seal_ranked(KEYS, x, marks, settled), *settled], shape)
    assert 3 * float((back - x).norm()) < float((rowwise - x).norm())


# ---- who matters
def exact(of: Recorder, layer: int) -> Tensor:
    """What each row gets of all that see it, on average, of all heads: from whole matrices, [T]."""
    seen = (of.seen[layer] > 0).any(0).sum(0)
    return of.seen[layer].sum((0, 1)) / seen


def looked(one: Walk, pieces: Sequence[int]) -> Recorder:
    """What the walk's prompt attends to, fed in pieces."""
    record = Recorder(one.request.prompt_len)
    one.plain = replace(one.plain, attend=record)
    for piece in cuts(one.request.prompt, pieces):
        one.feed(piece)
    return record


@pytest.mark.parametrize("pieces", [[96], [5], [30, 1]], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_with_all_rows_as_probes_the_estimate_is_exact(pieces: list[int], window: int | None) -> None:
    model = tiny.model() if window is None else sliding(window, 3)
    prompt = tiny.prompts(96)[0]
    one = Walk(model, prompt, evict=saliency(model, probes=1.0))
    record = looked(one, pieces)
    for layer in range(model.config.layers):
        got = one.phase.evict.saliency(one.request, layer, 0, 96)  # type: ignore[union-attr]
        assert torch.allclose(got, exact(record, layer), rtol=1e-4)


def test_probes_find_most_of_what_matters() -> None:
    """A tenth of the rows names the upper 60 % far better than chance."""
    prompt, upper = tiny.prompts(400)[0], 240
    one = Walk(tiny.model(), prompt, evict=saliency(probes=0.05))
    record, shares = looked(one, [400]), list[float]()
    for layer in range(4):
        want = set(exact(record, layer).topk(upper).indices.tolist())
        got = one.phase.evict.saliency(one.request, layer, 0, 400)  # type: ignore[union-attr]
        shares.append(len(want & set(got.topk(upper).indices.tolist())) / upper)
    assert min(shares) > 0.7, "chance is 0.6"


def test_first_rows_do_not_win_for_being_seen_more() -> None:
    """Under uniform attention: L times the harmonic number, first over last, for sums; that number once divided."""
    n, harmonic = 50, sum(1 / i for i in range(1, 51))
    uniform = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
    sums = uniform.sum(0)
    assert float(sums[0] / sums[-1]) == pytest.approx(n * harmonic)
    each = sums / saliency(probes=1.0).seeing(n, 0)
    assert float(each[0] / each[-1]) == pytest.approx(harmonic)


def test_probes_are_drawn_once_each_and_depend_on_the_request_alone() -> None:
    every = probed(1000, 0.05, 0)
    assert len(set(every)) == 100 and every[50:] == tuple(range(950, 1000)) and max(every[:50]) < 950
    assert every == probed(1000, 0.05, 0) != probed(1000, 0.05, 1)
    assert probed(1, 0.05, 0) == (0,) and probed(30, 1.0, 0) == tuple(range(30))


# ---- what rows read, number by number
class Slow(Asking):
    """attend, over rows kept as they are, decoded row by row: attention matrices, classes and levels in Python."""

    def __init__(self) -> None:
        self.marks, self.scale, self.known = dict[int, list[Tensor]](), dict[int, list[Tensor]](), dict[Any, Tensor]()

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self._one(read) for read in reads]

    def _one(self, read: Read) -> Tensor:
        first, last, length = read.span.positions[0], read.span.positions[-1], read.span.request.prompt_len
        if first < length:
            assert (first, last) == (0, length - 1), "in one piece"
            self._prompt(read, length)
            return read.attend()
        assert first == last
        seen, keys, values = first, read.part.k.clone(), read.part.v.clone()
        for side, rows in zip(SIDES, (keys, values)):
            if sealed := seen // GAP * GAP:
                rows[:, :sealed] = self._packed(read.layer, side, rows[:, :sealed].clone(), length)
        weights = torch.stack([self._weights(read, keys, 0, head) for head in range(read.q.shape[1])])  # [hq, N]
        if (first + 1) % GAP == 0:
            self.marks[read.layer].append(weights.sum(0)[-GAP:])
        group = read.q.shape[1] // values.shape[0]
        return torch.stack([w @ values[head // group] for head, w in enumerate(weights)])[None]

    def _weights(self, read: Read, keys: Tensor, row: int, head: int) -> Tensor:
        group = read.q.shape[1] // keys.shape[0]
        return (keys[head // group] @ read.q[row, head] * read.scale).softmax(-1)

    def _prompt(self, read: Read, length: int) -> None:
        got, seeing = torch.zeros(length, dtype=read.q.dtype), torch.zeros(length, dtype=read.q.dtype)
        for row in probed(length, 0.05, 0):
            seeing[: row + 1] += 1
            for head in range(read.q.shape[1]):
                got[: row + 1] += self._weights(read, read.part.k[:, : row + 1], row, head)
        sealed = length // GAP * GAP
        self.marks[read.layer] = [(got / seeing)[:sealed]]
        self.scale[read.layer] = [x.abs().amax(1).sqrt().half().to(x.dtype) for x in (read.part.k, read.part.v)]

    def _packed(self, layer: int, side: int, x: Tensor, length: int) -> Tensor:
        """[h, rows, D] of finished blocks -> what they come back as."""
        every, at = torch.empty_like(x), 0
        for marks in self.marks[layer]:
            ranked = sorted(range(len(marks)), key=lambda row: (-float(marks[row]), row))
            upper = set(ranked[: len(marks) // GAP * UPPER])
            for row in range(len(marks)):
                key = layer, side, at + row
                if side == VALUES and key not in self.known:
                    self.known[key] = self._row(x[:, at + row], self.scale[layer][side], HIGH if row in upper else LOW)
            for bits, mine in ((HIGH, sorted(upper)), (LOW, sorted(set(range(len(marks))) - upper))):
                each = UPPER if bits == HIGH else GAP - UPPER
                for first in range(0, len(mine) if side == KEYS else 0, each):
                    some = [at + row for row in mine[first : first + each]]
                    if (layer, side, some[0]) not in self.known:
                        back = self._channels(x[:, some], bits)
                        self.known |= {(layer, side, row): back[:, i] for i, row in enumerate(some)}
            for row in range(len(marks)):
                every[:, at + row] = self.known[layer, side, at + row]
            at += len(marks)
        assert at == x.shape[1]
        return every

    @staticmethod
    def _channels(x: Tensor, bits: int) -> Tensor:
        """Keys [h, n, D] of one class in a block: a channel lies between its own ends."""
        low = x.amin(1).half().to(x.dtype)
        step = ((x.amax(1) - low) / (2**bits - 1)).half().to(x.dtype)
        levels = ((x - low[:, None]) / step[:, None].where(step[:, None] > 0, 1)).round().clamp(0, 2**bits - 1)
        return levels * step[:, None] + low[:, None]

    @staticmethod
    def _row(x: Tensor, scale: Tensor, bits: int) -> Tensor:
        even = x / scale
        low = even.min().half().to(x.dtype)
        step = ((even.max() - low) / (2**bits - 1)).half().to(x.dtype)
        return (((even - low) / step).round().clamp(0, 2**bits - 1) * step + low) * scale


def tokens() -> list[int]:
    return tiny.prompts(WHOLE)[0]


@cache
def slowly() -> Tensor:
    """Logits of all rows."""
    slow = Slow()
    one = Walk(tiny.model(), tokens()[:PROMPT], attend=slow)
    one.plain = replace(one.plain, attend=slow)
    return torch.cat([one.feed(tokens()[:PROMPT]), *(one.feed([token]) for token in tokens()[PROMPT:])])


def bordered(at: int, n: int) -> int:
    """As many of `n` rows as a step may bring."""
    return min(n, (at // GAP + 1) * GAP - at, WHOLE - at)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(("prompt", "size"), [([5], 1), ([PROMPT], 3), ([5], 30)], ids=str)
def test_every_row_reads_what_it_would_alone(prompt: list[int], size: int) -> None:
    every, want = tokens(), slowly()
    one = walk(tiny.model(), every[:PROMPT])
    got = [one.feed(piece) for piece in cuts(every[:PROMPT], prompt)]
    while (at := one.request.computed) < WHOLE:
        got.append(one.feed(every[at : at + bordered(at, size)]))
    assert torch.allclose(torch.cat(got), want, **CLOSE)
    dense = uncached.logits(tiny.model(), every)
    assert torch.allclose(want[:PROMPT], dense[:PROMPT], **CLOSE), "prompts are computed from rows as they are"
    assert float((want[PROMPT:] - dense[PROMPT:]).abs().max()) > 0.01, "and what follows is not"


@pytest.mark.usefixtures("in_double")
def test_trees_leave_no_trace_but_their_path() -> None:
    """Every node reads its own path; siblings of a block's last row are asked too, and what they say is forgotten."""
    every, want = tokens(), slowly()
    one = walk(tiny.model(), every[:PROMPT])
    one.feed(every[:PROMPT])
    while (at := one.request.computed) + 8 < WHOLE:
        tree, parents, path = [every[at]], [-1], [0]
        for right in every[at + 1 : at + bordered(at, 8)]:
            pair = [right, 3 + (right + 1) % 60] if right % 2 else [3 + (right + 1) % 60, right]
            tree += pair
            parents += [path[-1]] * 2
            path.append(len(tree) - 2 + pair.index(right))
        logits = one.try_(tree, parents)
        assert torch.allclose(logits[path], want[at : at + len(path)], **CLOSE)
        one.kv.commit(0)  # it failed, and is tried again
        one.try_(tree, parents)
        one.commit(tree, path[: 1 + at % len(path)])
        assert one.kv.layers[0].n == one.request.computed


@pytest.mark.usefixtures("in_double")
def test_forks_and_dumps_read_alike() -> None:
    every, want = tokens(), slowly()
    first = walk(tiny.model(), every[:PROMPT])
    first.feed(every[:PROMPT])
    twin = first.fork()
    for one in (first, twin):
        while (at := one.request.computed) < 60:
            assert torch.allclose(one.feed([every[at]]), want[at : at + 1], **CLOSE)
    other = walk(tiny.model(), every[:PROMPT])
    other.kv.load(first.kv.dump())
    other.request.tokens, other.request.computed = list(first.request.tokens), first.request.computed
    first.kv.close()
    assert first.ledger.used == bytes_of([twin])
    twin.kv.close()
    assert first.ledger.used == 0
    while (at := other.request.computed) < WHOLE:
        assert torch.allclose(other.feed([every[at]]), want[at : at + 1], **CLOSE)
    assert other.ledger.used == bytes_of([other])


def bytes_of(walks: Sequence[Walk]) -> int:
    buffers = {}
    for one in walks:
        for layer in one.kv.layers:
            assert layer.blocks is not None
            for buffer in (*layer.blocks.held, *(slab.buffer for slab in layer.slabs)):
                buffers[id(buffer)] = sum(plane.nbytes for plane in buffer.planes)
    return sum(buffers.values())


# ---- bytes
@pytest.mark.parametrize("prompt", [3, 16, 100])
def test_bytes_after_every_token(prompt: int) -> None:
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)  # two heads of 16
    one = walk(model, tiny.prompts(prompt)[0])
    one.feed(one.request.prompt)
    for _ in range(30):
        rows = one.request.computed
        sealed = rows // GAP * GAP
        for layer in one.kv.layers:
            assert layer.blocks is not None and layer.blocks.counts == [sealed // GAP] * 2
            assert layer.live_bytes == packed_rows(sealed) + 2 * (rows - sealed) * 32 * 2
            assert layer.slabs[0].buffer.cap <= max(128, prompt + 64)
        one.feed([7])
    assert one.ledger.used == bytes_of([one])


def packed_rows(rows: int, numbers: int = 32) -> float:
    """Bytes of both sides of so many packed rows, and of the values' scales of channels."""
    levels = 2 * (numbers * (HIGH + LOW) / 2 + 1) / 8
    return rows * (levels + 32 / 8 + 2 * numbers * 32 / 8 / GAP) + 2 * numbers


@pytest.mark.parametrize("prompt", [20, 130])
def test_what_admission_is_told_is_what_is_taken(prompt: int) -> None:
    engine = tiny.engine({"store": STORE}, prefix_cache=False)
    assert isinstance(engine, Engine)
    request = Request(tiny.prompts(prompt)[0], tiny.greedy(40))
    engine.add(request)
    engine.step()
    while request.left is None:
        engine.step()
    assert engine.ledger.peak <= engine.store.cost(prompt + 1), "sealing takes no more than was booked"


def test_what_is_read_is_counted_packed() -> None:
    """A token reads its sealed rows in the bytes they take, and the others in theirs; a block's last row reads keys
    once more."""
    prompt, new = 50, 30
    engine = tiny.engine({"store": STORE}, prefix_cache=False)
    assert isinstance(engine, Engine)
    request = Request(tiny.prompts(prompt)[0], tiny.greedy(new))
    engine.add(request)
    engine.step()
    before, want = engine.counters.kv_bytes_read, 0.0
    while request.left is None:
        engine.step()
    for seen in range(prompt, prompt + new - 1):  # rows before a token's own
        sealed = seen // GAP * GAP
        both = packed_rows(sealed, 24) + 2 * (seen + 1 - sealed) * 24 * 4
        want += 4 * both * (1.5 if (seen + 1) % GAP == 0 else 1)
    assert engine.counters.kv_bytes_read - before == want


# ---- the control
@cache
def off(shuffled: bool) -> float:
    """How far logits are from those of rows as they are, over several prompts."""
    found, method = 0.0, ZipCache(**(KNOBS | {"high": 8}))
    for prompt in tiny.prompts(*range(90, 130, 4)):
        runtime = (PermutedClasses(method) if shuffled else method).bind(host(tiny.model()))
        one = Walk(tiny.model(), prompt, evict=runtime, format=method.format())
        one.feed(prompt)
        got = torch.cat([one.feed([token]) for token in range(5, 15)])
        found += float((got - oracle.logits(tiny.checkpoint(), [*prompt, *range(5, 15)])[len(prompt) :]).norm())
    return found


def test_shuffled_saliency_loses() -> None:
    assert off(shuffled=True) > 1.03 * off(shuffled=False)


# ---- together with others
def test_sixteen_bits_are_as_is() -> None:
    assert type(ZipCache(high=16, low=16).format()) is Raw
    prompts = tiny.prompts(41, 70)
    got = tiny.outs(tiny.run(tiny.engine({"store": "zipcache:high=16,low=16"}), prompts))
    assert got == [oracle.greedy(tiny.checkpoint(), prompt, 16)[0] for prompt in prompts]


def test_prompts_share_nothing() -> None:
    engine = tiny.engine({"store": STORE})
    assert isinstance(engine, Engine) and engine.store.tree is None


REFUSED = [
    ({"attend": "quest"}, "packs finished rows in blocks: attend quest .*Leave out --attend"),
    ({"evict": "snapkv"}, "also fills evict: leave out --evict snapkv"),
    ({"evict": "zipvl"}, "also fills evict: leave out --evict zipvl"),
    ({"decode": "block_diffusion"}, "block_diffusion finishes tokens in blocks of its own. Choose another decode"),
]


@pytest.mark.parametrize(("verbs", "why"), REFUSED, ids=str)
def test_what_does_not_go_together_is_refused_by_name(verbs: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        tiny.engine({"store": STORE, **verbs})


@pytest.mark.parametrize(
    ("knobs", "fix"),
    [
        ("high=3", "choose one of 2, 4, 8, 16"),
        ("high=2,low=4", "high at least as large as low"),
        ("high=16", "16 for both"),
        ("important=1.5", "between 0 and 1"),
        ("gap=0", "at least 1"),
        ("probes=0", "above 0 and at most 1"),
    ],
)
def test_bad_knobs_name_value_and_fix(knobs: str, fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        tiny.engine({"store": f"zipcache:{knobs}"})
