"""One interface for what a step costs: from the counters of a step to seconds, joules and money.

Behind it are device files (roofline.py) and what was measured (profile.py); all that plans or simulates asks nothing
else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from phasewise.plan.shape import DecoderShape


@dataclass(slots=True)
class StepWork:
    """The work of one engine step, in rows.

    `pairs`: for every prompt row, the rows it sees, itself included, summed. `prefixes`: KV rows that prompt slices
    read, each slice's once. `ended`: rows of prompts that are done with this step (the prefix cache takes them over).
    `context`: KV rows that decodes read, their own included. `emits`: rows from which tokens
    are drawn. `share`: of the model's depth, which a schedule of layers may cut.
    """

    prefill_rows: int = 0
    pairs: float = 0.0
    prefixes: int = 0
    decode_rows: int = 0
    context: int = 0
    emits: int = 0
    ended: int = 0
    share: float = 1.0

    @property
    def rows(self) -> int:
        return self.prefill_rows + self.decode_rows


class Counts(NamedTuple):
    """The same step in units that any device knows, by closed forms."""

    flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float


class Price(NamedTuple):
    """The cost of a step on one device. `joules` and `money` are 0 where the source says nothing of them."""

    seconds: float
    joules: float = 0.0
    money: float = 0.0


class Cost(Protocol):
    """A source of the costs of steps, such as a profile or a device file."""

    def price(self, step: StepWork) -> Price: ...

    def seconds(self, step: StepWork) -> float:
        """The same, the time alone."""
        ...


def counts(step: StepWork, shape: DecoderShape) -> Counts:
    """Two operations per weight and row, four per number of a query and row seen; every weight that any row needs is
    read once, and so is the KV of each request."""
    rows = step.rows
    experts = min(shape.chosen, shape.experts) if shape.experts else 1
    body = shape.attention_weights + experts * shape.expert_weights
    seen = shape.layers * shape.heads * shape.head_dim * (step.pairs + step.context)
    read = shape.attention_weights + shape.touched(rows) * shape.expert_weights if rows else 0.0
    return Counts(
        flops=(2 * rows * body + 4 * seen) * step.share + 2 * step.emits * shape.head_weights,
        weight_bytes=(read * step.share + (shape.head_weights if step.emits else 0)) * shape.width,
        kv_read_bytes=(step.prefixes + step.context) * shape.row_bytes * step.share,
        kv_written_bytes=rows * shape.row_bytes * step.share,
    )
