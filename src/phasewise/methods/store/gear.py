"""Few bits, what they miss as a product of thin matrices, and the few outliers apart (GEAR, arXiv 2403.05527).

Promises that a block is off by hardly more than its rounding and the best approximation of that rank leave, that the
newest rows are read as the model made them, and that what a row reads depends on how many rows it sees and on nothing
else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from phasewise.errors import UserError
from phasewise.kv.format import BlockCut, Raw, RowFormat
from phasewise.methods.store._approximated import Approximated
from phasewise.verbs.method import Method
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Gear(Method, Storing):
    """Rows are sealed in blocks of `block`, per head. Of every line of a block (a channel of keys, a token of values)
    the share `sparse` of extreme numbers, half of them the largest and half the smallest, is kept apart in 16 bits with
    an index of 16; at least one of each, unless `sparse=0` (GEAR-L). The rest is rounded to `bits` bits a number,
    `group` numbers of a line at a time, and what that misses is kept as a product of two 16-bit matrices of `rank`
    columns, found by power iteration from the same start for every block.

    16 bits = rows as they are. In bfloat16, native kernels multiply queries and weights with packed levels, thin
    matrices and outliers as they lie, for the heads and blocks that `kivi` names and ranks up to 16; elsewhere blocks
    are opened before rows read them. Left out: one product for all of a prompt, and fewer columns for what comes after
    it (every block has its own, which makes blocks functions of their rows alone); outliers across heads.
    """

    bits: Literal[2, 4, 16] = 2
    group: int = 64
    block: int = 64
    rank: int = 4
    sparse: float = 0.02

    paper: ClassVar[str] = "arXiv 2403.05527"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"bits": 16}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"bits": 4}, {})
    tight: ClassVar[dict[str, object]] = {"group": 4, "block": 8, "rank": 1, "sparse": 0.1}

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 16):
            raise UserError(f"gear: bits={self.bits}: choose 2, 4, or 16 (not quantised)")
        for name in ("group", "block"):
            if getattr(self, name) < 1:
                raise UserError(f"gear: {name}={getattr(self, name)} must be at least 1")
        if self.rank < 0:
            raise UserError(f"gear: rank={self.rank} must be 0 (no product) or more")
        if not 0 <= self.sparse <= 0.5:
            raise UserError(
                f"gear: sparse={self.sparse} must be between 0 (no outliers) and 0.5, a share of all numbers"
            )

    @property
    def traits(self) -> Traits:
        return Traits("store", packs_blocks=self.bits < 16)

    def format(self) -> RowFormat:
        if self.bits == 16:
            return Raw()
        cut = BlockCut(self.block)
        return Approximated(self.bits, self.group, (cut, cut), rank=self.rank, sparse=self.sparse)
