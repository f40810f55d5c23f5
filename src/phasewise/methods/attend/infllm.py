"""Each query reads the blocks whose means of keys get most attention (InfLLM v2 of MiniCPM4, arXiv 2506.07900).

Promises exact attention over at most `init` + `topk` + local blocks per query row and KV head, of which decoded rows
read nothing else; so in prompts, too. Rows at positions below `dense_len` - 1 are dense, and the cache stays whole.
Nothing has to be trained for it, but the paper's models went on training with it for 5B tokens, and lose little because
of that: low-rank weights beside the model's own can be, with which prompts and answers run. A model that did not go on
has never been without the blocks that are left out here, and may lose more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import rounded
from phasewise.kv.format import KVShape
from phasewise.kv.vectors import Kept
from phasewise.methods.attend._select import grouped, tally
from phasewise.methods.attend.dense import Dense
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.model.lowrank import Delta, shapes
from phasewise.step.plan import EVERYTHING, AttentionPlan, KernelScores, Rivals, Scorer, Scores, TopK
from phasewise.step.read import Read
from phasewise.step.reference import NEVER, single
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "infllm"
RANK = 8  # of the low-rank weights of every linear layer


@dataclass(frozen=True)
class InfLLM(Method, Attend):
    """A block is `block` consecutive positions. A row always reads the first `init` blocks and the last
    ceil(`window` / `block`) + 1, its own among them; of the others the `topk` of the highest score. Keys are averaged
    over windows of half a block, one at every quarter; the softmax of every query head over the windows that end no
    later than the row, summed over the query heads that share a KV head, scores windows, and a block has the largest
    score of the five windows that overlap it.

    Means cost 1 / `block` * 4 of the keys, within the KV budget. Where rows were given up, means are of what is left of
    a window, and all keys are read to choose. `weights`: `none` (the model as it is), `auto` (trained for this model
    and these knobs; beside the model, or shipped), a file, or `random:SEED` (to test with). Left out: a softmax
    normalised by coarser means, which the paper has to save a second pass over the means; prompts are no faster for it
    here, for only decoded rows list what they read.
    """

    block: int = 64
    init: int = 1
    window: int = 2048
    topk: int = 64
    dense_len: int = 8192
    weights: str = "none"

    paper: ClassVar[str] = "arXiv 2506.07900"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"topk": 1 << 30}
    budgets: ClassVar[tuple[dict[str, object], ...]] = (
        {},
        {"block": 16, "window": 128, "topk": 16, "dense_len": 512},
        {"block": 16, "window": 128, "topk": 4, "dense_len": 512},
    )
    tight: ClassVar[dict[str, object]] = {"block": 4, "init": 1, "window": 4, "topk": 1, "dense_len": 0}

    def __post_init__(self) -> None:
        if self.block < 4 or self.block % 4:
            fix = max(4, -(-self.block // 4) * 4)
            raise UserError(
                f"infllm: block={self.block} must be a multiple of 4, for windows begin at every quarter: choose {fix}"
            )
        for name, least in (("init", 0), ("window", 1), ("topk", 1), ("dense_len", 0)):
            if getattr(self, name) < least:
                raise UserError(f"infllm: {name}={getattr(self, name)} must be at least {least}")

    def artefact(self, config: ModelConfig) -> Artefact:
        """Low-rank weights of all layers."""
        knobs = {name: getattr(self, name) for name in ("block", "init", "window", "topk", "dense_len")}
        tensors = shapes(config, range(config.layers), RANK)
        return Artefact("attend.infllm", tensors, knobs, "leave weights out for the model as it is")

    @property
    def traits(self) -> Traits:
        return Traits("attend", own_attention=True, low_rank=self.weights != "none")

    def bind(self, host: Host) -> InfLLM | _Tuned | Dense:
        config = host.model.config
        if self.weights == "none":
            return self
        if not self.acts(config.max_positions):
            return Dense()  # everything is read: that is the model itself
        tensors = host.artefact(self.artefact(config), self.weights)
        return _Tuned(self, Delta(tensors, host.model.dtype, host.model.device))

    @property
    def local(self) -> int:
        """Blocks up to a row's own that it reads."""
        return -(-self.window // self.block) + 1

    @property
    def most(self) -> int:
        """Rows that one query row reads per KV head, at most."""
        return (self.init + self.local + self.topk) * self.block

    def acts(self, seen: int) -> bool:
        """Whether a row that sees so many, itself included, chooses."""
        return seen >= self.dense_len and -(-seen // self.block) * self.block > self.most

    def beside(self, layer: int, shape: KVShape, end: int) -> int:
        if not self.acts(end):
            return 0
        return BlockMeans(self.block).windows(end) * shape.heads * shape.dim * shape.dtype.itemsize

    @cached_property
    def keys(self) -> TopK:
        """What a row reads, as data."""
        least = max(self.dense_len, self.most + 1)
        return TopK(self.scorer, self.most, least, unit=self.block, first=self.init, local=self.local, units=self.topk)

    @property
    def scorer(self) -> Scorer:
        return BlockMeans(self.block)

    @cached_property
    def _plan(self) -> AttentionPlan:
        return AttentionPlan(self.keys)

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self.acts(span.last + 1) else EVERYTHING


class BlockMeans:
    """Scores blocks by the softmax over means of keys: see `InfLLM`."""

    kernel: KernelScores | None

    def __init__(self, block: int) -> None:
        self.block, self.stride = block, block // 4
        self.kernel = KernelScores(
            (NAME, block, 0), every=True, each=4, before=1, step=self.stride, parts=2, vectors=self.windows
        )

    def windows(self, rows: int) -> int:
        """How many are complete in so many rows."""
        return max(rows // self.stride - 1, 0)

    def scores(self, read: Read, index: Kept, rows: Rivals) -> Scores:
        if rows.single or self._in_order(read):
            return Scores(self.votes(read, self._means(read, index)))
        return Scores(self._slow_votes(read, rows.seen))

    def votes(self, read: Read, means: Tensor) -> Tensor:
        """The score of every block from the means [h, W, D] of complete windows, logarithms [h, R, B]."""
        logits = grouped(read.q, len(means)) * read.scale @ means.float().mT[:, None]  # [h, G, R, W]
        return self.pooled(logits, None, read.q_positions, read.span.last)

    def pooled(self, logits: Tensor, filled: Tensor | None, at: Tensor, last: int) -> Tensor:
        """Logits of windows [h, G, R, W], of which those `filled` [1 | h, R, W] are of any row, to the scores that rows
        `at` [R] give all blocks up to that of position `last`, logarithms [h, R, B]."""
        ends = (torch.arange(logits.shape[3], device=logits.device) + 2) * self.stride - 1  # last positions
        among = (ends <= at[:, None])[None]  # [1, R, W]
        votes = tally(logits, among if filled is None else among & filled)  # [h, R, W]
        blocks = last // self.block + 1
        wide = F.pad(votes, (0, max(0, 4 * blocks - votes.shape[2])), value=NEVER).nan_to_num(NEVER, neginf=NEVER)
        return F.max_pool1d(wide, 5, 4, 1)[..., :blocks]

    # ---- means of keys
    def _in_order(self, read: Read) -> bool:
        """Whether the rows simply go on behind all before them, of which each sees all."""
        part, window = read.part, read.step.model.config.attention[read.layer].window
        whole = read.span.sees is None and not read.late and part.ids is None and read.view is None
        near = window is None or read.span.last < window
        return whole and near and part.plain and part.n == read.span.positions[0]

    def _means(self, read: Read, found: Kept) -> Tensor:
        """Of all windows that are complete with this step's rows, [h, W, D]. Those of committed rows are kept."""
        part, stride = read.part, self.stride
        read.count_bytes(found.known.nbytes)
        upto, fresh = found.upto, self.windows(part.size[1])
        if fresh == upto:
            return found.known
        read.count_keys((fresh + 1 - upto) * stride * part.size[0])
        return torch.cat((found.known, self.mean(part.keys(upto * stride, (fresh + 1) * stride))), 1)

    def index(self, read: Read) -> Kept:
        """The means of windows of committed rows."""
        part, stride = read.part, self.stride
        key = NAME, self.block, part.slab
        found = part.derived.get(key)
        if not isinstance(found, Kept):
            found = Kept(part.keys(0, 0))
        upto = self.windows(part.n)
        if found.upto < upto and (single(read) or self._in_order(read)):
            read.count_keys((upto + 1 - found.upto) * stride * part.size[0])
            found = found.roomy(self.windows(rounded(part.size[1])))
            found.add(self.mean(part.keys(found.upto * stride, (upto + 1) * stride)))
            part.derived.keep(key, found)
        return found

    def mean(self, keys: Tensor) -> Tensor:
        """The means of the windows in consecutive rows [h, m, D], in the keys' type."""
        heads, _, dim = keys.shape
        rows = keys.float().view(heads, -1, self.stride, dim)
        quarters = rows[:, :, 0]  # [h, W + 1, D]
        for j in range(1, self.stride):  # in order, as the kernel adds
            quarters = quarters + rows[:, :, j]
        return ((quarters[:, :-1] + quarters[:, 1:]) / (2 * self.stride)).to(keys.dtype)

    def _slow_votes(self, read: Read, seen: Tensor) -> Tensor:
        """The same where rows see different parts of a window: a query times a mean is the mean of its products."""
        part = read.part
        heads, _ = part.size
        read.count_keys(part.size[0] * part.size[1])
        if read.view is not None and read.view.moved is not None:
            slots, delta = read.view.moved
            seen = seen.clone()
            seen[:, :, slots] &= (delta == 0)[:, None]
        products = grouped(read.q, heads) * read.scale @ part.k.float().mT[:, None]  # [h, G, R, N]
        quarter = (part.positions // self.stride)[:, None].expand(-1, len(read.q), -1)  # [1 | h, R, N]
        count = read.span.last // self.stride + 1
        wide = quarter[:, None].expand_as(products)
        sums = products.new_zeros((*products.shape[:3], count))
        sums = sums.scatter_add_(3, wide, products.masked_fill(~seen[:, None], 0.0))
        apart = max(len(quarter), len(seen))  # 1: the same for all heads
        rows = products.new_zeros((apart, len(read.q), count))
        rows.scatter_add_(2, quarter.expand(apart, -1, -1), seen.expand(apart, -1, -1).to(products.dtype))
        total, filled = sums[..., :-1] + sums[..., 1:], rows[..., :-1] + rows[..., 1:]
        means = total / filled[:, None].clamp_min(1)
        return self.pooled(means, filled > 0, read.q_positions, read.span.last)


class _Tuned(Attend):
    """The same with weights that were trained for it, with which all rows run, those that read everything as well."""

    def __init__(self, knobs: InfLLM, delta: Delta) -> None:
        self.knobs, self.delta, self.beside = knobs, delta, knobs.beside

    def plan(self, span: Span) -> AttentionPlan:
        return self.knobs.plan(span)
