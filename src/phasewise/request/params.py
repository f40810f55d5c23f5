"""What a caller may ask of a request: how tokens are drawn, when to stop, targets."""

from __future__ import annotations

from dataclasses import dataclass, field

from phasewise.errors import UserError


@dataclass(frozen=True, slots=True)
class Params:
    """How tokens are drawn and when to stop. `temperature=0` is greedy; neutral values switch a rule off."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()  # besides the model's end tokens
    ignore_eos: bool = False
    greedy: bool = field(init=False, repr=False)
    penalised: bool = field(init=False, repr=False)
    """Whether logits are changed by penalties or a bias. Both are asked of every request in every step."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise UserError(f"{name}={value!r} is out of range: it must lie in [{low}, {high}]")
        for token, bias in self.logit_bias.items():
            if not -_BIAS <= bias <= _BIAS:
                raise UserError(f"logit_bias[{token}]={bias!r} is out of range: it must lie in [{-_BIAS}, {_BIAS}]")
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        object.__setattr__(self, "greedy", self.temperature == 0.0)
        object.__setattr__(self, "penalised", bool(penalties or self.logit_bias))


_BIAS = 1e4  # finite: infinities of either sign could leave no token, or two certain ones
_RANGES = (
    ("max_tokens", 1, 1 << 30),
    ("temperature", 0.0, 100.0),
    ("top_k", 0, 1 << 30),
    ("top_p", 1e-9, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-3, 1e3),
    ("presence_penalty", -10.0, 10.0),
    ("frequency_penalty", -10.0, 10.0),
)


@dataclass(frozen=True, slots=True)
class SLO:
    """Targets of one request, seconds; None = no target."""

    ttft: float | None = None
    tpot: float | None = None
