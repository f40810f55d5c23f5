"""Rotary position embeddings: the frequencies of every scaling scheme, one table per step, one shift."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phasewise.errors import UnsupportedModel, UserError, near
from phasewise.ops.native.stack import Turns


@dataclass(frozen=True)
class Rope:
    """One kind of rotation: inverse frequencies (float32 values, one per rotated pair), factor on cos and sin."""

    inverse: tuple[float, ...]
    scale: float = 1.0
    scheme: str = field(default="default", compare=False)  # by which these were found

    @property
    def fixed(self) -> bool:
        """True if the frequencies are the same for texts of all lengths."""
        return self.scheme not in ("dynamic", "longrope", "su")

    @property
    def dim(self) -> int:
        """The number of leading dimensions of a head that are rotated."""
        return 2 * len(self.inverse)


@dataclass(frozen=True)
class RopeRequest:
    """The inputs of a scaling scheme. `context` is the longest sequence that the model will serve."""

    dim: int
    theta: float
    trained: int  # max_position_embeddings
    original: int  # original_max_position_embeddings, before any stretching
    context: int
    settings: Mapping[str, Any]

    def number(self, key: str) -> float:
        value = self.settings.get(key)
        if not isinstance(value, (int, float)):
            raise UserError(f"config.json: the rope settings need a number {key!r}, got {value!r}.")
        return float(value)


Frequencies = tuple[Tensor, float]  # [dim / 2] float32, factor on cos and sin


def _powers(request: RopeRequest, theta: float | None = None) -> Tensor:
    """theta^(2i / dim) in float32, the arithmetic every published checkpoint was trained with."""
    exponents = torch.arange(0, request.dim, 2, dtype=torch.float32) / request.dim
    return torch.as_tensor((request.theta if theta is None else theta) ** exponents)


def _default(request: RopeRequest) -> Frequencies:
    return 1.0 / _powers(request), 1.0


def _linear(request: RopeRequest) -> Frequencies:
    return (1.0 / _powers(request)) / request.number("factor"), 1.0


def _dynamic(request: RopeRequest) -> Frequencies:
    """NTK-aware base for `context`, fixed for every request: the base must not depend on who shares a batch."""
    length = max(request.context, request.trained)
    factor = request.number("factor")
    stretch = factor * length / request.trained - (factor - 1)
    return 1.0 / _powers(request, request.theta * stretch ** (request.dim / (request.dim - 2))), 1.0


def _llama3(request: RopeRequest) -> Frequencies:
    """Long wavelengths are divided by `factor`, short ones kept, and those between are blended."""
    factor, low, high = (request.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    inverse = 1.0 / _powers(request)
    wavelength = 2 * math.pi / inverse
    kept = ((request.original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * inverse / factor + kept * inverse, 1.0


def _yarn(request: RopeRequest) -> Frequencies:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, sharpen attention by a log factor."""
    factor = request.number("factor") if request.settings.get("factor") else request.trained / request.original

    def dimension(turns: float) -> float:  # the dimension that turns this often within the original context
        return request.dim * math.log(request.original / (turns * 2 * math.pi)) / (2 * math.log(request.theta))

    first = dimension(request.settings.get("beta_fast") or 32)
    last = dimension(request.settings.get("beta_slow") or 1)
    if request.settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, request.dim - 1)
    span = last - first if last != first else 0.001
    kept = 1 - ((torch.arange(request.dim // 2, dtype=torch.float32) - first) / span).clamp(0, 1)
    powers = _powers(request)
    inverse = (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept
    return inverse, _yarn_scale(request.settings, factor)


def _yarn_scale(settings: Mapping[str, Any], factor: float) -> float:
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])

    def gain(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    numerator, denominator = settings.get("mscale"), settings.get("mscale_all_dim")
    return gain(numerator) / gain(denominator) if numerator and denominator else gain(1.0)


def _longrope(request: RopeRequest) -> Frequencies:
    """LongRoPE (arXiv 2402.13753): the long factors for all positions when `context` passes the original length."""
    key = "long_factor" if request.context > request.original else "short_factor"
    factors = request.settings.get(key)
    if not isinstance(factors, list) or len(factors) != request.dim // 2:
        size = len(factors) if isinstance(factors, list) else factors
        raise UserError(f"config.json: rope setting {key!r} needs {request.dim // 2} numbers, got {size}.")
    inverse = 1.0 / (torch.tensor(factors, dtype=torch.float32) * _powers(request))
    scale = request.settings.get("attention_factor")
    if scale is None:
        factor = request.settings.get("factor") or request.trained / request.original
        scale = math.sqrt(1 + math.log(factor) / math.log(request.original)) if factor > 1 else 1.0
    return inverse, float(scale)


def _divided(request: RopeRequest) -> Frequencies:
    """A divisor for each frequency, as GGUF files have what llama3 comes to."""
    divisors = request.settings.get("divisors")
    if not isinstance(divisors, list) or len(divisors) != request.dim // 2 or not all(each > 0 for each in divisors):
        raise UserError(f"the rope's divisors must be {request.dim // 2} positive numbers, got {divisors!r:.80}.")
    return 1.0 / _powers(request) / torch.tensor(divisors, dtype=torch.float32), 1.0


SCHEMES: dict[str, Callable[[RopeRequest], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "divided": _divided,
    "su": _longrope,  # longrope's first name
}


def scheme_name(settings: Mapping[str, Any]) -> str:
    """The scaling scheme that rope settings ask for; older checkpoints call the key `type`."""
    name = settings.get("rope_type") or settings.get("type") or "default"
    if name not in SCHEMES:
        raise UnsupportedModel(f"Unknown rope scaling {name!r} in config.json. {near(str(name), SCHEMES)}")
    return str(name)


def context_limits(settings: Mapping[str, Any], trained: int, original: int) -> tuple[int, int]:
    """(default, largest) sequence length that these rope settings serve.

    Schemes whose frequencies depend on the length default to the length at which they equal the trained model.
    """
    name = scheme_name(settings)
    if name in ("longrope", "su"):
        return min(original, trained), trained
    if name == "dynamic":
        return trained, int(trained * float(settings.get("factor") or 1))
    if name == "yarn":
        stretched = max(trained, int(original * float(settings.get("factor") or 1)))
        return stretched, stretched
    return trained, trained


def make_rope(request: RopeRequest) -> Rope:
    inverse, scale = SCHEMES[scheme_name(request.settings)](request)
    return Rope(tuple(inverse.tolist()), scale, scheme_name(request.settings))


Tables = tuple[tuple[Tensor, Tensor], ...]


class Rotary:
    """cos and signed sin of one step's rows, at `positions` int64 [T] of the tables, a pair [P, 1, R] per kind."""

    __slots__ = ("_taken", "positions", "tables")

    def __init__(self, tables: Tables, positions: Tensor) -> None:
        self.tables, self.positions = tables, positions
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, index: Tensor) -> Rotary:
        """The same for a subset of the rows; `index` int64 or bool over the rows."""
        return Rotary(self.tables, self.positions[index])

    def rows(self, kind: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin [T, 1, R] of the rows."""
        if kind not in self._taken:
            cos, sin = self.tables[kind]
            self._taken[kind] = cos[self.positions], sin[self.positions]
        return self._taken[kind]

    def __call__(self, kind: int, x: Tensor) -> Tensor:
        """`x` [T, n, D] rotated by its rows' positions; only the first R of D dimensions turn. May overwrite `x`."""
        cos, sin = self.rows(kind)
        size = cos.shape[-1]
        if size == x.shape[-1]:
            return _turn(x, cos, sin)
        turning = x[..., :size]
        turning.copy_(_turn(turning, cos, sin))
        return x


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # sin carries the minus of the first half, so that swapping the halves is all that is left of the rotation
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


LEAST = 1024  # positions that tables are made for


class RopeTables:
    """cos and sin of all kinds of rotation of a model, on its device, worked out as far as positions have been met.

    Tables end at `most`, the model's context. What lies beyond, as far as texts may go on there, is worked out for the
    rows of a step alone: so no text takes memory for its length.
    """

    def __init__(self, ropes: tuple[Rope, ...], context: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self.scales = tuple(rope.scale for rope in ropes)
        halves = [torch.tensor(rope.inverse, dtype=torch.float32, device=device) for rope in ropes]
        self.signed = tuple(torch.cat((-half, half)) for half in halves)  # [R]: cos is even, sin is odd
        self.most = max(LEAST, 1 << (context - 1).bit_length())
        self._grow(0)

    def __call__(self, positions: Tensor, end: int | None = None) -> Rotary:
        """`end`: no position is as large; asked of the device if not given."""
        end = int(positions.max()) + 1 if end is None else end
        if end > self.most:
            return Rotary(self._far(positions), torch.arange(positions.shape[0], device=positions.device))
        if end > self._end:
            self._grow(end)
        return Rotary(self._tables, positions)

    def turns(self, end: int) -> Turns:
        """The tables for native kernels, for all positions below `end`, which is at most `most`."""
        if end > self._end:
            self._grow(end)
        return self._turns

    def turns_at(self, positions: Sequence[int]) -> Turns:
        """Tables of these positions, one after the other."""
        return Turns(self._far(torch.tensor(positions, device=self._device)))

    def _far(self, positions: Tensor) -> Tables:
        """Tables of `positions` int64 [T] alone. A position's numbers are the same whatever else is asked for."""
        if self._end < self.most:
            self._grow(self.most)
        kept, near = positions.clamp_max(self.most - 1), (positions < self.most)[:, None, None]
        column = positions.double()[:, None, None]  # in float32 angles of large positions would be far off
        return tuple(
            (torch.where(near, cos[kept], far_cos), torch.where(near, sin[kept], far_sin))
            for (cos, sin), (far_cos, far_sin) in zip(self._tables, self._made(column))
        )

    def _grow(self, end: int) -> None:
        end = max(LEAST, 1 << (end - 1).bit_length()) if end else 0
        self._tables = self._made(torch.arange(end, dtype=torch.float32, device=self._device)[:, None, None])
        self._turns = Turns(self._tables)
        self._end = end

    def _made(self, column: Tensor) -> Tables:
        return tuple(self._table(column, kind) for kind in range(len(self.signed)))

    def _table(self, column: Tensor, kind: int) -> tuple[Tensor, Tensor]:
        angles = column * self.signed[kind].to(column.dtype)  # [P, 1, R]
        cos, sin = angles.cos(), angles.sin_()
        if self.scales[kind] != 1.0:
            cos, sin = cos.mul_(self.scales[kind]), sin.mul_(self.scales[kind])
        return cos.to(self.dtype), sin.to(self.dtype)

    def shift(self, kind: int, k: Tensor, delta: int | Tensor) -> Tensor:
        """Rotated keys `k` [..., D] moved by `delta` positions (int, or a tensor that broadcasts over k's leading
        dimensions), in float32 but for the angles, and returned in k's dtype. The factor on cos and sin is already in
        `k`."""
        cos, sin = self.angles(kind, torch.as_tensor(delta, device=k.device))
        size = cos.shape[-1]
        moved = _turn(k[..., :size].float(), cos, sin).to(k.dtype)
        return moved if size == k.shape[-1] else torch.cat((moved, k[..., size:]), -1)

    def angles(self, kind: int, delta: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of moves by `delta` int64 [...], float32 [..., R]."""
        angles = delta.double()[..., None] * self.signed[kind].double()
        return angles.cos().float(), angles.sin().float()
