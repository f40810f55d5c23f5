"""Each query reads the blocks whose mean key it meets best (MoBA, arXiv 2502.13189).

Exact attention over at most `blocks` blocks per query row and KV head, the row's own among them. The cache stays whole,
so a later query may read any row. Prompts are dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import rounded
from phasewise.kv.format import KVShape
from phasewise.kv.pages import PageKeys
from phasewise.methods.attend._select import grouped
from phasewise.step.plan import EVERYTHING, AttentionPlan, KernelScores, Rivals, Scores, TopK
from phasewise.step.read import Read
from phasewise.step.reference import NEVER, by_unit
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class MoBA(Method, Attend):
    """A block is `block` consecutive positions. A row reads its own block and the `blocks` - 1 best of the others.

    A block's score is the product of the query and the mean of the block's keys, the largest over the query heads that
    share a KV head. The mean is taken over what the row may see, so drafts, replays and evicted caches choose as single
    steps would. Means cost 1 / (2 `block`) of the KV, within its budget. Left out: sparse prompts and the training with
    them, and a choice for each query head of its own.
    """

    block: int = 64
    blocks: int = 8
    dense_layers: int = 0

    paper: ClassVar[str] = "arXiv 2502.13189"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"blocks": 1 << 24}
    traits: ClassVar[Traits] = Traits("attend", own_attention=True, phases=("decode",))
    tight: ClassVar[dict[str, object]] = {"block": 4, "blocks": 3}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"blocks": 4}, {"block": 32, "blocks": 8})

    def __post_init__(self) -> None:
        if min(self.block, self.blocks) < 1 or self.dense_layers < 0:
            got = f"block={self.block}, blocks={self.blocks}, dense_layers={self.dense_layers}"
            raise UserError(f"moba: {got}: block and blocks must be at least 1, dense_layers at least 0")

    @cached_property
    def _plan(self) -> AttentionPlan:
        most = self.block * self.blocks
        return AttentionPlan(
            TopK(BlockGate(self.block), most, most + 1, unit=self.block, units=self.blocks - 1,
                 dense_layers=self.dense_layers)
        )  # fmt: skip

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if span.last >= self.block * self.blocks else EVERYTHING

    def beside(self, layer: int, shape: KVShape, end: int) -> int:
        """Bytes of one mean key per head of every block."""
        if layer < self.dense_layers or end <= self.block * self.blocks:
            return 0
        return end // self.block * shape.heads * (shape.dim * shape.dtype.itemsize + 16)


class BlockGate:
    """Scores a block by the product of the query and the mean of its keys."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.kernel = KernelScores(
            PageKeys.key("means", block), softmax=False, step=block, vectors=lambda rows: rows // block,
            empty=lambda keys: PageKeys.none("means", block, keys),
        )  # fmt: skip

    def index(self, read: Read) -> PageKeys | None:
        """Means of the blocks that are complete before this step; None where rows lie in other slots than positions."""
        part, key = read.part, PageKeys.key("means", self.block, read.part.slab)
        if not part.plain:
            return None
        known = part.derived.get(key)
        means = known if isinstance(known, PageKeys) else PageKeys.none("means", self.block, part.keys(0, 0))
        upto = min(*read.span.positions, part.n) // self.block
        if means.upto < upto:
            read.count_keys((part.n - means.upto * self.block) * part.size[0])
            means = means.roomy(rounded(part.size[1]) // self.block)
            means.fill(part, upto)
            part.derived.keep(key, means)
        return means

    def scores(self, read: Read, index: PageKeys | None, rows: Rivals) -> Scores:
        """Complete blocks have the means of the index; of the others a row takes the mean of what it sees."""
        whole = rows if rows.unit is not None else by_unit(rows, read.part.positions, read.span.last)
        assert whole.unit is not None and whole.number is not None
        (heads, n), start = read.part.size, 0 if index is None else index.upto * self.block
        q, counts = grouped(read.q, heads), whole.number.expand(heads, -1, -1)  # [h, G, R, D], [h, R, blocks]
        if index is not None and not bool((counts[..., : index.upto] % self.block == 0).all()):
            return self.scores(read, None, rows)  # a window ends within a block
        read.count_keys(heads * (n - start))
        met = q @ read.part.keys(start, n).float().mT[:, None]  # [h, G, R, n - start]
        met = met.masked_fill(~rows.rivals.expand(heads, -1, -1)[:, None, :, start:], 0.0)
        unit = whole.unit.expand(heads, -1)[:, None, None, start:].expand_as(met)
        total: Tensor = met.new_zeros((*met.shape[:3], counts.shape[-1])).scatter_add(3, unit, met)
        value = (total / counts[:, None].clamp_min(1)).amax(1)  # a mean of products is a product with the mean
        if index is not None:
            read.count_bytes(index.known.nbytes)
            value[..., : index.upto] = (q @ index.known[0].float().mT[:, None]).amax(1)
        value = value.masked_fill(counts == 0, NEVER)
        if rows.unit is None:  # units are slots
            value = value.gather(2, whole.unit.expand(heads, -1)[:, None].expand(-1, read.q.shape[0], -1))
        return Scores(value)
