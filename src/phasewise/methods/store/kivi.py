"""Keys in few bits per channel, values in few bits per token, the newest rows as they are (KIVI, arXiv 2402.02750).

Promises that no sealed number is off by more than half a step of its group (and the rounding of the group's ends to 16
bits), that the newest rows are read as the model made them, and that what a row reads depends on how many rows it sees
and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from phasewise.errors import UserError
from phasewise.kv.format import BlockCut, Raw, RowFormat
from phasewise.methods.store._grouped import Grouped
from phasewise.verbs.method import Method
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Kivi(Method, Storing):
    """Keys have few channels that are large in all tokens, so they are rounded channel by channel, `group` consecutive
    tokens at a time; values token by token, `group` consecutive channels at a time. Each group has the 2 ** bits evenly
    spaced levels between its smallest and largest number, which are kept in 16 bits: `bits + 32 / group` bits a number.

    Prompts are computed from rows as they are. Then, and whenever `residual` of them are there, all keys of a block of
    `residual` rows are sealed at once; of the values all but the newest `residual`. 16 bits = rows as they are. A head
    of fewer than `group` channels has one group per token. In bfloat16, native kernels multiply packed numbers as they
    lie, and round no opened ones; they want heads of 32, 64 .. channels, groups of whole bytes and blocks of 8, 16 ..
    rows. Elsewhere blocks are opened before rows read them.
    """

    bits: Literal[2, 4, 16] = 2
    group: int = 32
    residual: int = 128

    paper: ClassVar[str] = "arXiv 2402.02750"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"bits": 16}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"bits": 4}, {})
    tight: ClassVar[dict[str, object]] = {"group": 4, "residual": 8}

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 16):
            raise UserError(f"kivi: bits={self.bits}: choose 2, 4, or 16 (not quantised)")
        if self.group < 1:
            raise UserError(f"kivi: group={self.group} must be at least 1 (numbers that share their levels)")
        if self.residual < 1 or self.residual % self.group:
            fix = -(-max(self.residual, 1) // self.group) * self.group
            raise UserError(f"kivi: residual={self.residual} must be a multiple of group={self.group}: choose {fix}")

    @property
    def traits(self) -> Traits:
        return Traits("store", packs_blocks=self.bits < 16)

    def format(self) -> RowFormat:
        if self.bits == 16:
            return Raw()
        return Grouped(self.bits, self.group, (BlockCut(self.residual), BlockCut(1, self.residual)))
