"""A model as far as its costs go: numbers, without weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.model.config import ModelConfig


@dataclass(frozen=True)
class DecoderShape:
    """A decoder's sizes. `experts` and `chosen`: of a mixture's layer, 0 and 0 of a dense one, whose MLP has
    `intermediate` columns each. `width`: bytes of a weight; `kv_width`: of a cached number."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    chosen: int = 0
    width: float = 2.0
    kv_width: float = 2.0

    @classmethod
    def of(cls, config: ModelConfig, width: float = 2.0, kv_width: float = 2.0) -> DecoderShape:
        """Read a model's shape. Where only some layers are mixtures, all are taken to be as most are."""
        mixtures = [moe for moe in config.moe if moe is not None]
        moe = mixtures[0] if 2 * len(mixtures) > config.layers else None
        return cls(
            config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim,
            config.intermediate if moe is None else moe.intermediate, config.vocab,
            0 if moe is None else moe.experts, 0 if moe is None else moe.top_k, width, kv_width,
        )  # fmt: skip

    @cached_property
    def attention_weights(self) -> int:
        """Numbers of all layers' projections into and out of attention."""
        return self.layers * self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @cached_property
    def expert_weights(self) -> int:
        """Numbers of one MLP in all layers: gate, up and down."""
        return self.layers * 3 * self.hidden * self.intermediate

    @cached_property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def weight_bytes(self) -> float:
        """Bytes of all parameters, the embeddings once; norms and biases are too few to count."""
        return (self.attention_weights + max(1, self.experts) * self.expert_weights + self.head_weights) * self.width

    @cached_property
    def row_bytes(self) -> float:
        """KV of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_width

    def touched(self, rows: int) -> float:
        """Experts of a layer that a step of so many rows reads, each row choosing evenly and by itself."""
        if not self.experts:
            return 1.0
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows)

    def split(self, ways: int) -> DecoderShape:
        """Returns each device's part of every layer among `ways` (tensor parallelism). Raises UserError."""
        if ways < 1 or self.heads % ways or self.kv_heads % ways or self.intermediate % ways:
            raise UserError(
                f"ways={ways} does not divide {self.heads} heads, {self.kv_heads} KV heads and {self.intermediate} "
                "columns of an MLP: choose a divisor of all three"
            )
        return replace(
            self, heads=self.heads // ways, kv_heads=self.kv_heads // ways, intermediate=self.intermediate // ways,
            vocab=-(-self.vocab // ways),
        )  # fmt: skip
