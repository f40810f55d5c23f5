"""A few channels of every key say which rows are worth reading whole (Double Sparsity, arXiv 2408.07092).

Promises exact attention over at most `k` rows per query row and KV head, of which only those are read, and of all other
rows the heaviest channels alone; the cache stays whole, so a later query may read any row. Prompts are dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.format import KVShape, entry_bytes
from phasewise.methods._amounts import check_amount
from phasewise.methods.attend._select import RowScorer, grouped, tally
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.ops.packing import dequantise, pack, packed, quantise, unpack
from phasewise.step.plan import EVERYTHING, AttentionPlan, KernelScores, NamedSlots, TopK, share
from phasewise.step.read import Read
from phasewise.step.reads import queries_of
from phasewise.step.reference import named
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

ENDS = 4  # bytes of a packed label's step and lowest level


@dataclass(frozen=True)
class DoubleSparsity(Method):
    """Copies of the `channels` heaviest channels of every key (a share of them up to 1, above a number) lie beside the
    rows, within the KV budget. A row always reads itself; the `k` - 1 others are those that get most of the softmax
    over these channels' part of the scores, summed over the query heads that share a KV head. The first `dense_layers`
    layers read everything. With `bits=4` a copy is kept in four bits a number, evenly spaced between its own ends, and
    32 bits for these: fewer bytes are held and read, but no kernel ranks such copies, so the choice is made in torch.

    How heavy a channel is has been measured once, over some text (train/artefacts/attend_double_sparsity.py): the mean
    of |q k| after rotation, summed over the query heads of a KV head. `weights`: `auto` (measured for this model;
    beside it, or shipped), a file, or `random:SEED`, channels at random. Left out: channels and lists for each query
    head of its own.

    With `offload`, rows of all layers but the dense ones and the last are held by the host, and only their copied
    channels by the device. A layer's rows are chosen and fetched while the one before it runs, by queries that are
    predicted: the layer's own projection of what enters the layer before. Two layers' rows are on the device at a time.
    Where that layer does not run for a row, the layer's own queries choose. Here both are one memory, so nothing is
    copied: the counter `link_bytes` says what answers would fetch and send back.
    """

    channels: float = 0.25
    k: int = 256
    dense_layers: int = 2
    weights: str = "auto"
    bits: Literal[4, 16] = 16
    offload: bool = False

    paper: ClassVar[str] = "arXiv 2408.07092"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "calibration"
    neutral: ClassVar[dict[str, object]] = {"k": 1 << 30, "weights": "random:0"}
    traits: ClassVar[Traits] = Traits("attend", own_attention=True, phases=("decode",))
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"k": 128})
    untrained: ClassVar[dict[str, object]] = {"weights": "random:0"}
    tight: ClassVar[dict[str, object]] = {"channels": 4.0, "k": 12, "dense_layers": 0}

    def __post_init__(self) -> None:
        if not self.channels > 0:
            raise UserError(f"double_sparsity: channels={self.channels} must be above 0: a share up to 1, or a number")
        check_amount("double_sparsity", "channels", self.channels, "channels")
        if self.bits not in (4, 16):
            raise UserError(f"double_sparsity: bits={self.bits}: choose 4, or 16 (copies as keys are)")
        for name, least in (("k", 1), ("dense_layers", 0)):
            if getattr(self, name) < least:
                raise UserError(f"double_sparsity: {name}={getattr(self, name)} must be at least {least}")
        if self.offload and not self.dense_layers:
            raise UserError(
                "double_sparsity: dense_layers=0 with offload: choose at least 1, as no layer comes before the first "
                "to fetch its rows"
            )

    def artefact(self, config: ModelConfig) -> Artefact:
        """How heavy every channel is; the same for any number of them."""
        size = (config.kv_heads, config.head_dim)
        return Artefact("attend.double_sparsity", {f"{layer}.weight": size for layer in range(config.layers)})

    def bind(self, host: Host) -> _DoubleSparsity:
        there = host.model.config.head_dim
        if self.channels > there:
            fix = f"say at most {there}, or a share up to 1"
            raise UserError(f"double_sparsity: channels={self.channels:.0f}, but a key has {there}: {fix}")
        tensors = host.artefact(self.artefact(host.model.config), self.weights)
        layers = range(host.model.config.layers)
        heavy = [tensors[f"{i}.weight"].float().to(host.model.device) for i in layers]
        return Offloaded(self, heavy, host.model) if self.offload else _DoubleSparsity(self, heavy)


class _DoubleSparsity(RowScorer, Attend):
    name = "double_sparsity"

    def __init__(self, knobs: DoubleSparsity, heavy: Sequence[Tensor]) -> None:
        """`heavy`: how heavy each layer's channels are, [H, D]."""
        self.knobs = knobs
        count = share(knobs.channels, heavy[0].shape[1])
        order = [each.sort(dim=-1, descending=True, stable=True).indices[:, :count] for each in heavy]
        self.channels = [each.sort(-1).values for each in order]  # int64 [H, r]
        self.count = count
        self.packed = knobs.bits < 16
        self.dtype = torch.uint8 if self.packed else None
        if not self.packed:
            self.kernel = KernelScores(
                (self.name, 0), width=count, channels=[each.int().contiguous() for each in self.channels]
            )
        self.keys = TopK(self, knobs.k, knobs.k + 1, dense_layers=knobs.dense_layers)
        self._plan = AttentionPlan(self.keys)

    def beside(self, layer: int, shape: KVShape, end: int) -> int:
        if layer < self.knobs.dense_layers or end <= self.knobs.k:
            return 0
        return end * shape.heads * self.width(shape.dim) * (1 if self.packed else shape.dtype.itemsize)

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if span.last + 1 >= self.keys.least else EVERYTHING

    # ---- how rows are ranked
    def width(self, dim: int) -> int:
        return packed(self.count, self.knobs.bits) + ENDS if self.packed else self.count

    def stand(self, read: Read, start: int, stop: int) -> Tensor:
        keys = read.part.keys(start, stop)  # [h, m, D]
        found = keys.gather(2, self._channels(read)[:, None].expand(-1, stop - start, -1))
        return coded(found, self.knobs.bits) if self.packed else found

    def opened(self, stands: Tensor) -> Tensor:
        return decoded(stands, self.count, self.knobs.bits) if self.packed else stands

    def votes(self, read: Read, stands: Tensor, among: Tensor | None) -> Tensor:
        channels = self._channels(read)[:, None, None]  # [h, 1, 1, r]
        q = grouped(self.asking(read), len(channels)) * read.scale
        q = q.gather(3, channels.expand(*q.shape[:3], -1))  # [h, G, R, r]
        return tally(q @ stands.float().mT[:, None], among)

    def asking(self, read: Read) -> Tensor:
        """The queries by which rows are chosen, [R, hq, D]."""
        return read.q

    def _channels(self, read: Read) -> Tensor:
        every, heads = self.channels[read.layer], read.part.heads
        return every if heads is None else every[heads]


class Offloaded(_DoubleSparsity):
    """Rows are chosen a layer ahead, by predicted queries; what is fetched for them, and sent back, is counted."""

    def __init__(self, knobs: DoubleSparsity, heavy: Sequence[Tensor], model: Model) -> None:
        super().__init__(knobs, heavy)
        self.kernel = None  # kernels choose by a layer's own queries
        self.model, self.hosted = model, range(knobs.dense_layers, model.config.layers - 1)
        self._plan = AttentionPlan(NamedSlots(self.slots))

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan  # short texts are fetched whole

    def slots(self, reads: Sequence[Read]) -> list[Tensor | None]:
        """What rows read; what of it is fetched is counted."""
        for read in reads:
            self._predict(read)
        out = named(self.keys, reads)
        for read, chosen in zip(reads, out):
            if read.layer in self.hosted:
                layer = read.span.kv.layers[read.layer]
                each = entry_bytes(layer.format, layer.shape)
                read.step.count("link_bytes", fetched(chosen, read.part.size[0], read.part.n) * each)
        return out

    def _predict(self, read: Read) -> None:
        """Notes the queries of a span's rows in the layer that runs next, [R, Hq, D]."""
        span, walk = read.span, read.span.walk
        layer = read.layer + 1 if walk is None else next((i for i in walk if i > read.layer), -1)
        key = self.name, id(span), layer
        if layer not in self.hosted or key in read.step.notes or read.rows is not None:
            return
        assert read.step.x is not None
        rotary = self.model.rotary(read.q_positions)
        read.step.notes[key] = self.model.layers[layer].project(read.step.x[read.at], rotary)[0]

    def asking(self, read: Read) -> Tensor:
        predicted: Tensor | None = read.step.notes.get((self.name, id(read.span), read.layer))
        if predicted is None or read.rows is not None:
            return read.q
        return queries_of(read.part, predicted, self.model.config.kv_heads)

    def stayed(self, span: Span, keep: int | Sequence[int]) -> None:
        """Rows that stay are sent to the host."""
        rows = keep if isinstance(keep, int) else len(keep)
        layers = [span.kv.layers[layer] for layer in self.hosted]
        each = sum(entry_bytes(layer.format, layer.shape) * layer.shape.heads for layer in layers)
        span.kv.counters.link_bytes += rows * each


def fetched(chosen: Tensor | None, heads: int, n: int) -> int:
    """The (row, KV head) pairs of the first `n` rows, those of earlier steps, that are `chosen`, as `NamedSlots` has
    it: each once, however many rows of this step read it."""
    if chosen is None:
        return heads * n
    if chosen.dtype == torch.bool:
        some = chosen[..., :n].any(1)  # [1 | h, n]
        return int(some.sum()) * (heads // len(some))
    return int(((chosen >= 0) & (chosen < n)).sum())


def coded(labels: Tensor, bits: int) -> Tensor:
    """Labels [h, m, r] -> uint8 [h, m, ceil(r * bits / 8) + 4]: levels, then each label's step and lowest level in
    float16. No number is off by more than half a step and the rounding of its label's ends."""
    levels, step, low = quantise(labels, bits)
    ends = torch.stack((step, low), -1).view(torch.uint8)  # [h, m, 4]
    return torch.cat((pack(levels, bits), ends), -1)


def decoded(stands: Tensor, count: int, bits: int) -> Tensor:
    """The inverse of `coded`, float32 [h, m, count]."""
    ends = stands[..., -ENDS:].contiguous().view(torch.float16)
    return dequantise(unpack(stands[..., :-ENDS], count, bits), ends[..., 0], ends[..., 1], torch.float32)
