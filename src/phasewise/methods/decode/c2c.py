"""Another model reads the same prompt, and what it has cached is fused into the model's own cache through learned
projections and gates (Cache-to-Cache, arXiv 2510.03215).

Promises that the prompt is computed as ever, and its rows, but for the last, are then replaced at once: each row by
itself, `K + share * content` where a layer's gate is open, the same for V. The last token is computed over these, and
what follows is decoded plainly by the model alone. With all gates closed it is the model. Answers hang on the weights
that were trained for the two models (train/artefacts/decode_c2c.py); `Output.recalled` says how many rows were fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.left import Given, Left
from phasewise.methods.decode._fuser import SIDES, added, layer_map, shapes
from phasewise.methods.decode._second import Reader, Rows, config_of, second
from phasewise.methods.decode.autoregressive import Autoregressive
from phasewise.model.artefacts import Artefact, fingerprint
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome, slice_span
from phasewise.verbs.host import Host

NAME = "c2c"


@dataclass(frozen=True)
class C2C:
    """`sharer`: the second model, of the same vocabulary: token by token they read the same. It reads prompts `piece`
    tokens at a time, of which a scheduler's budget knows nothing, and its cache is given back once the rows are fused.
    `width`: of the fuser, whose size grows with layers x width x (width + rows of both caches). gates=closed is the
    model alone.

    `weights`: `auto` (trained for this pair; beside the model, or shipped), a file, or `random:SEED` (to test with).
    Rows are shared with other requests as they were computed, and never as they were fused. Left out: models of
    different tokenizers, several sharers, sharers' caches kept for other requests, decoding with drafts.
    """

    sharer: str = "pocket-draft"
    gates: Literal["learned", "closed"] = "learned"
    width: int = 48
    piece: int = 512
    weights: str = "auto"

    paper: ClassVar[str] = "arXiv 2510.03215"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"gates": "closed"}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({},)
    tight: ClassVar[dict[str, object]] = {"piece": 16}
    plain_prompts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for knob in ("width", "piece"):
            if getattr(self, knob) < 1:
                raise UserError(f"c2c: {knob}={getattr(self, knob)} must be at least 1")
        if self.gates not in ("learned", "closed"):
            raise UserError(f"c2c: gates={self.gates}: choose learned or closed")

    def artefact(self, config: ModelConfig, sharer: ModelConfig | None = None, partner: str = "") -> Artefact:
        """The fuser of this pair."""
        sharer = sharer or config_of(self.sharer)
        sizes = config.kv_heads * config.head_dim, sharer.kv_heads * sharer.head_dim
        made = shapes(config.layers, config.kv_heads, sizes, self.width)
        knobs: dict[str, int | float | str] = {"sharer": self.sharer, "width": self.width}
        return Artefact("decode.c2c", made, knobs, "say gates=closed for the model alone", partner)

    def bind(self, host: Host) -> Any:
        if self.gates == "closed":
            return Autoregressive().bind(host)
        sharer = second(host, NAME, "sharer", self.sharer)
        wanted = self.artefact(host.model.config, sharer.config, fingerprint(sharer))
        return Fusing(self, host, sharer, host.artefact(wanted, self.weights))


class Fuser:
    """Rows of the model, fused with the sharer's, in float32 and rounded once; which gates are open never depends on
    the rows."""

    def __init__(self, model: Model, sharer: Model, tensors: Mapping[str, Tensor]) -> None:
        self.weights = {name: tensor.to(model.device, torch.float32) for name, tensor in tensors.items()}
        self.of = layer_map(model.config.layers, sharer.config.layers)

    def open(self, side: str, layer: int) -> bool:
        """Whether anything is added there."""
        return bool(self.weights[f"{side}.gate"][layer] > 0)

    def __call__(self, own: Rows, other: Rows) -> Rows:
        """All layers' rows [H, r, D] of the same tokens."""
        out = []
        for layer, rows in enumerate(own):
            k, v = (
                self._fused(side, layer, mine, theirs) if self.open(side, layer) else mine
                for side, mine, theirs in zip(SIDES, rows, other[self.of[layer]], strict=True)
            )
            out.append((k, v))
        return out

    def _fused(self, side: str, layer: int, own: Tensor, other: Tensor) -> Tensor:
        flat, theirs = (x.transpose(0, 1).flatten(1).float() for x in (own, other))
        made = flat + added(self.weights, side, layer, flat, theirs)
        return made.view(own.shape[1], own.shape[0], own.shape[2]).transpose(0, 1).to(own.dtype)


class Fusing:
    """Whatever it knows of a request, its reader holds; that its rows have been fused, its KV says (`KV.foreign`)."""

    singly = True
    leaves = False

    def __init__(self, knobs: C2C, host: Host, sharer: Model, tensors: Mapping[str, Tensor]) -> None:
        self.plain, self.fuser = Autoregressive().bind(host), Fuser(host.model, sharer, tensors)
        self.reader = Reader(host, NAME, sharer, knobs.piece)
        self.reader.companion.done = lambda request: self._until(request) is None

    def given(self, request: Request, left: Callable[[str], Left | None]) -> Given | None:
        until = self._until(request)
        if until is None:
            return None
        request.recalled = 0
        self.reader.follow(request, request.computed)
        if request.computed < until:
            return None
        assert request.kv is not None
        parts = [layer.read()[0] for layer in request.kv.layers]
        rows = self.fuser([part.between(0, until) for part in parts], self.theirs(request, until))
        self.reader.forget(request)
        request.recalled = until
        return Given(rows, False, 0)

    def theirs(self, request: Request, stop: int) -> Rows:
        """The sharer's rows of the first tokens."""
        return self.reader.rows(request, 0, stop)

    @staticmethod
    def _until(request: Request) -> int | None:
        """How many rows are to be fused; None: none, or they have been."""
        fused = request.kv is not None and request.kv.foreign
        return None if fused or not request.prefilling or request.prompt_len < 2 else request.prompt_len - 1

    def rows(self, request: Request) -> int:
        until = self._until(request)
        return self.plain.rows(request) if until is None else until - request.computed

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans = []
        for request, budget in zip(requests, budgets):
            until = self._until(request)
            if until is None:
                spans += self.plain.propose([request], [budget], phase)
            else:
                spans.append(slice_span(request, min(budget, until - request.computed), phase))
        return spans

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        return self.plain.accept(spans, hidden)
