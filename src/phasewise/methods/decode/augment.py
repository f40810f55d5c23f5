"""Latents behind a prompt, made of its KV by a trained coprocessor before the frozen model answers (arXiv 2412.17747).

Promises that the base model and the prompt's rows stay as they are, to the bit: `latents` rows are added behind them,
at the next positions, and every later token reads them too. They stand for no token; no text and no usage has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from phasewise.catalog import part
from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape
from phasewise.methods.attend.dense import Dense
from phasewise.methods.decode._then import Handing, checked
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.model.lowrank import Delta, shapes
from phasewise.request.request import Request
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome, slice_span
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.skip import Skip
from phasewise.verbs.traits import MARGIN, SHARED, Traits

NAME = "augment"
RANK = 16  # of the coprocessor's low-rank weights, in all linear layers
MOST = 256
SOFT, GAIN = "soft", "gain"


@dataclass(frozen=True)
class Augment(Method):
    """When a prompt is computed, the coprocessor (the base with low-rank weights) reads its KV with `latents` learned
    rows behind it; what it makes of them, normed and scaled, goes through the base as rows of the prompt, and the last
    of these draws the first token. Two passes of `latents` rows, and as many rows of KV for the rest of the request;
    later tokens stand so many positions further on, so a text is that much shorter than the context.

    `weights`: `auto` (trained for this model and number; beside the model, or shipped), a file, or `random:SEED` (to
    test with). `latents` 0 is the base alone.
    `then` decodes what follows the latents; its drafts stand as far on as tokens do. Left out: a coprocessor with
    weights of its own (here the base's, and low-rank ones), latents while an answer is decoded, a coprocessor that runs
    beside a decoding that has begun without it, and attend, evict and skip methods, which are refused by name.
    """

    latents: int = 16
    weights: str = "auto"
    then: Any = part("decode", "autoregressive")

    paper: ClassVar[str] = "arXiv 2412.17747"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"latents": 0}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({},)
    tight: ClassVar[dict[str, object]] = {"latents": 5}

    def __post_init__(self) -> None:
        checked(NAME, self.then)
        if not 0 <= self.latents <= MOST:
            raise UserError(f"augment: latents={self.latents} must lie in [0, {MOST}], a number of rows (0 = none)")

    def artefact(self, config: ModelConfig) -> Artefact:
        """The coprocessor's low-rank weights, the rows that it begins with, and the scale of what it makes of them."""
        own = {SOFT: (self.latents, config.hidden), GAIN: (config.hidden,)}
        tensors = {**own, **shapes(config, range(config.layers), RANK)}
        return Artefact("decode.augment", tensors, {"latents": self.latents}, "say latents=0 to go without")

    @property
    def traits(self) -> Traits:
        then: Traits = self.then.traits
        if not self.latents:
            return then
        drafts = 1 if then.single_rows else max(MARGIN, then.margin)
        said = replace(then, brings=SHARED, added_rows=self.latents, base_alone=True)
        return replace(said, single_rows=False, margin=self.latents + drafts)

    def bind(self, host: Host) -> Any:
        if not self.latents:
            return host.bind(self.then)
        return Augmenting(host, self.then, host.artefact(self.artefact(host.model.config), self.weights))


class _Coprocessor(Skip):
    """The phase of the coprocessor's rows: every layer, with low-rank weights."""

    def __init__(self, delta: Delta) -> None:
        self.delta = delta

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        return None


class Augmenting(Handing):
    """A request goes through four states, told by tokens and rows alone: its prompt is computed, but for its last token
    as it seems, until latents are there as well; the coprocessor has run, and they lie in the drawer; they are in the
    KV; it is decoded."""

    def __init__(self, host: Host, then: Any, tensors: dict[str, Tensor]) -> None:
        super().__init__(host, then)
        model = host.model
        own = {name: tensors[name].to(model.device, model.dtype) for name in (SOFT, GAIN)}
        self.host, self.soft, self.gain = host, own[SOFT], own[GAIN]
        self.count = len(self.soft)
        self.then.displace(self.count)
        self.dense, self.drawer = Dense(), self._held
        rest = {name: tensor for name, tensor in tensors.items() if name not in own}
        self.coprocessor = _Coprocessor(Delta(rest, model.dtype, model.device))
        self._apart: dict[int, tuple[Phase, Phase]] = {}  # by the phase that it stands for, which lives as long

    def bring(self, verb: str, chosen: Any) -> Any:
        return self.dense if verb == "attend" else None

    def reach(self, context: int) -> int:
        return min(context, super().reach(context)) - self.count

    def _held(self, layer: int, shape: KVShape, room: Room) -> int:
        """Latents, until they are in the KV."""
        return 0 if layer or not room.prompt else self.soft.nbytes

    # ---- which rows
    def _waits(self, request: Request) -> bool:
        """True if the rows of its prompt are all there, and latents are to come."""
        assert request.kv is not None
        return request.prefilling and request.kv.layers[0].n == request.prompt_len

    def rows(self, request: Request) -> int:
        return self.count if self._waits(request) else super().rows(request)

    def own(self, request: Request, budget: int, phase: Phase) -> Span | None:
        if self._waits(request):
            return self._latents(request, phase)
        if not request.prefilling:
            return None
        span = slice_span(request, budget, phase)
        if span.end == request.prompt_len:
            span.beyond = 1  # its last token counts once latents are there: until then it is in its prompt
        return span

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans = super().propose(requests, budgets, phase)
        for span in spans:
            if not span.request.prefilling:
                span.positions, span.beyond = _later(span.positions, self.count), self.count
        return spans

    def _latents(self, request: Request, phase: Phase) -> Span:
        """The inputs of the coprocessor, or the rows that it has made."""
        assert request.kv is not None
        made: Tensor | None = request.state.get(NAME)
        at = range(request.prompt_len, request.prompt_len + self.count)
        tokens = [
            request.tokens[request.prompt_len - 1]
        ] * self.count  # stand for none: what is given enters in their place
        if made is None:
            return Span(
                request, request.kv, self._coprocessing(phase), tokens, at, given=self.soft, beyond=self.count + 1
            )
        return Span(request, request.kv, phase, tokens, at, given=made, beyond=self.count)

    def _coprocessing(self, phase: Phase) -> Phase:
        """The same phase, for rows that run with the coprocessor's weights."""
        if id(phase) not in self._apart:
            self._apart[id(phase)] = phase, replace(phase, skip=self.coprocessor)
        return self._apart[id(phase)][1]

    # ---- what becomes of them
    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        rest = [span for span in spans if span.given is not self.soft]  # nobody learns from what goes again
        told = iter(super().accept(rest, hidden) if rest else ())
        outcomes = [Outcome(0, []) if span.given is self.soft else next(told) for span in spans]
        for span in spans:
            if span.given is self.soft:
                rows = hidden.rows(list(range(span.start, span.start + span.rows)))
                span.request.state[NAME] = self.made(span.request, rows)
            elif span.given is not None:
                span.request.state.pop(NAME, None)
        return outcomes

    def made(self, request: Request, x: Tensor) -> Tensor:
        """Latents [N, d] from the coprocessor's rows after its last layer."""
        return self.host.model.norm(x) * self.gain


def _later(positions: Sequence[int], count: int) -> Sequence[int]:
    """Positions so many places further on: of a chain still a range, of a tree a list."""
    if isinstance(positions, range):
        return range(positions.start + count, positions.stop + count)
    return [position + count for position in positions]
