"""An architecture as a value: every difference between families is a field, decided once when it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phasewise.model.rope import Rope


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer. A query at position i sees keys j <= i with i - j < window."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Norms:
    """Which of a layer's four places have an RMSNorm, by their checkpoint names; None = no norm there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class MoeSpec:
    """A mixture-of-experts layer: `top_k` of `experts` per row, and where its tensors are in the checkpoint."""

    experts: int
    top_k: int
    intermediate: int
    renormalise: bool  # the chosen experts' weights are divided by their sum
    prefix: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    bias: bool = False  # of the router and of experts


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's gate, instead of act(gate) * up: (up + 1) * gate * sigmoid(alpha gate), where gate is at most `limit`
    and up between -limit and limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's whole architecture. Tuples named after layers hold one entry per layer."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int
    max_positions: int
    eps: float
    eos: tuple[int, ...]
    bos: int | None
    attention: tuple[AttentionSpec, ...]
    ropes: tuple[Rope, ...]
    rope_of: tuple[int | None, ...]  # which of `ropes` a layer uses; None = no rotary positions (NoPE)
    moe: tuple[MoeSpec | None, ...]
    norms: Norms = Norms()
    norm_offset: float = 0.0  # Gemma stores w - 1
    qk_norm: Literal["head", "full"] | None = None  # over each head's D, or over all heads at once
    activation: str = "silu"
    clamped: ClampedGate | None = None
    sink_scores: bool = False  # each query head has one more score, for which there is no row (gpt-oss's sinks)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    tied: bool = False
    mask: int | None = None  # the token that stands for an unknown one, in diffusion models
    fused: bool = False  # the checkpoint stores qkv_proj and gate_up_proj whole
