"""What the requests of a batch have in common is held and read once for all of them (Hydragen, arXiv 2402.05099).

Promises dense attention's results. Shared beginnings of prompts cost a step one read instead of one per request: rows
read fall from `B * P + sum S` to `P + sum S` for B requests with P rows in common and S of their own, level by level
where beginnings branch. The rows held fall likewise: admission counts a request's own rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.step.plan import AttentionPlan, SharedPrefix
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Hydragen(Method, Attend):
    """Requests that hold the same nodes of the prefix tree have these rows in common: whole blocks of their prompts.
    Their queries meet one copy of them together; each request's own rows come on top, joined by log-sum-exp in float32.

    A level is shared by at least `sharers` requests and has at least `rows` rows. It ends at a multiple of 64 of them
    (of `rows`, if that is less), between two blocks of the native kernel, whose softmax then goes on from level to
    level as if one request had read all: bit for bit what dense attention gives. A request reads alone where its rows
    are not plain: after eviction, under a window that has begun to move, in prompt slices long enough to be matrix
    products of their own. Common rows are stored once as well, in the prefix tree (kv/shared_rows.py), where no other
    method of the recipe moves or gives up rows of a prompt. Left out: rows that forks have in common beyond it.
    """

    sharers: int = 2
    rows: int = 64

    paper: ClassVar[str] = "arXiv 2402.05099"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"sharers": 1 << 30}
    everything = True
    traits: ClassVar[Traits] = Traits("attend", shared_reads=True)
    tight: ClassVar[dict[str, object]] = {"rows": 32}

    def __post_init__(self) -> None:
        for name, least in (("sharers", 2), ("rows", 1)):
            if getattr(self, name) < least:
                raise UserError(f"hydragen: {name}={getattr(self, name)} must be at least {least}")

    @cached_property
    def _plan(self) -> AttentionPlan:
        return AttentionPlan(shared=SharedPrefix(self.sharers, self.rows))

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan
