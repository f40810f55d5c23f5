"""Other models read the same prompt, and what they have cached is fused into the model's own cache through learned
projections and gates (Cache-to-Cache, arXiv 2510.03215).

Promises that the prompt is computed as ever, and its rows, but for the last, are then replaced at once: each row by
itself, `K + share * content` where a layer's gate is open, the same for V. The last token is computed over these, and
what follows is decoded by the model alone, plainly or as `then` does. With all gates closed it is the model. Several
sharers have a fuser each: in parallel, what they add is made of the clean rows, and no order of them changes a bit; in
sequence, each reads what those before it have made. Answers hang on the weights that were trained for the model and
each sharer (train/artefacts/decode_c2c.py); `Output.recalled` says how many rows were fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from phasewise.catalog import part
from phasewise.errors import UserError
from phasewise.kv.retained import InjectedKV, RetainedKV
from phasewise.methods.decode._fuser import SIDES, added, layer_map, shapes
from phasewise.methods.decode._second import PromptReader, Rows, config_of, second
from phasewise.methods.decode._then import Handing, checked, following
from phasewise.model.artefacts import Artefact, fingerprint
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "c2c"


@dataclass(frozen=True)
class C2C(Method):
    """`sharer`: the second model, of the same vocabulary: token by token they read the same; several are joined by `+`.
    Each reads prompts `piece` tokens at a time, of which a scheduler's budget knows nothing, and its cache is given
    back once the rows are fused. `several`: what they add is made side by side (`parallel`) or one after the other, as
    they are named (`sequential`). `width`: of the fuser, whose size grows with layers x width x (width + rows of both
    caches). gates=closed is the model alone.

    `weights`: `auto` (trained for each pair; beside the model, or shipped), a file for each sharer, joined by `+` as
    they are, or `random:SEED` (to test with). Rows are shared with other requests as they were computed, and never as
    they were fused. `then` decodes what follows the prompt: a drafter's second model follows the tokens alone and knows
    of no fused row. Left out: models of different tokenizers, sharers' caches kept for other requests.
    """

    sharer: str = "pocket-draft"
    several: Literal["parallel", "sequential"] = "parallel"
    gates: Literal["learned", "closed"] = "learned"
    width: int = 48
    piece: int = 512
    weights: str = "auto"
    then: Any = part("decode", "autoregressive")

    paper: ClassVar[str] = "arXiv 2510.03215"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"gates": "closed"}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({},)
    tight: ClassVar[dict[str, object]] = {"piece": 16}

    def __post_init__(self) -> None:
        checked(NAME, self.then)
        for knob in ("width", "piece"):
            if getattr(self, knob) < 1:
                raise UserError(f"c2c: {knob}={getattr(self, knob)} must be at least 1")
        if self.gates not in ("learned", "closed"):
            raise UserError(f"c2c: gates={self.gates}: choose learned or closed")
        if self.several not in ("parallel", "sequential"):
            raise UserError(f"c2c: several={self.several}: choose parallel or sequential")
        names, files = self._names, self._files
        if "" in names or len({*names}) < len(names):
            raise UserError(f"c2c: sharer={self.sharer}: name each sharer once, as in one+two")
        if len(files) > 1 and len(files) != len(names):
            raise UserError(f"c2c: weights={self.weights} are {len(files)} files for {len(names)} sharers: name one "
                            "for each, in the order of sharer, or say auto")  # fmt: skip

    @property
    def _names(self) -> list[str]:
        return self.sharer.split("+")

    @property
    def _files(self) -> list[str]:
        return self.weights.split("+")

    @property
    def each(self) -> list[C2C]:
        """The same with one sharer, for each of them."""
        files = self._files * len(self._names) if len(self._files) == 1 else self._files
        return [replace(self, sharer=name, weights=file) for name, file in zip(self._names, files, strict=True)]

    def artefact(self, config: ModelConfig, sharer: ModelConfig | None = None, partner: str = "") -> Artefact:
        """The fuser of the model and its one sharer."""
        sharer = sharer or config_of(self.sharer)
        sizes = config.kv_heads * config.head_dim, sharer.kv_heads * sharer.head_dim
        made = shapes(config.layers, config.kv_heads, sizes, self.width)
        knobs: dict[str, int | float | str] = {"sharer": self.sharer, "width": self.width}
        return Artefact("decode.c2c", made, knobs, "say gates=closed for the model alone", partner)

    @property
    def traits(self) -> Traits:
        then: Traits = self.then.traits
        return then if self.gates == "closed" else replace(then, injects_kv=True, base_alone=True)

    def bind(self, host: Host) -> Any:
        if self.gates == "closed":
            return host.bind(self.then)
        found = []
        for one in self.each:
            sharer = second(host, NAME, "sharer", one.sharer)
            wanted = one.artefact(host.model.config, sharer.config, fingerprint(sharer))
            found.append((sharer, Fuser(host.model, sharer, host.artefact(wanted, one.weights))))
        if self.several == "parallel":
            found.sort(key=lambda pair: fingerprint(pair[0]))  # sums are rounded alike, however sharers are named
        return Fusing(self, host, found)


class Fuser:
    """The addition to rows of the model, made of a sharer's, in float32; which gates are open never depends on rows."""

    def __init__(self, model: Model, sharer: Model, tensors: Mapping[str, Tensor]) -> None:
        self.weights = {name: tensor.to(model.device, torch.float32) for name, tensor in tensors.items()}
        self.of = layer_map(model.config.layers, sharer.config.layers)

    def open(self, side: str, layer: int) -> bool:
        """True if anything is added there."""
        return bool(self.weights[f"{side}.gate"][layer] > 0)

    def added(self, side: str, layer: int, own: Tensor, other: Rows) -> Tensor:
        """To a layer's rows [r, H * D], of the same tokens' in the sharer's cache."""
        return added(self.weights, side, layer, own, _flat(other[self.of[layer]][SIDES.index(side)]))


def fuse(fusers: Sequence[Fuser], own: Rows, others: Sequence[Rows], chained: bool = False) -> Rows:
    """All layers' rows [H, r, D] of the same tokens, fused with those of each fuser's sharer and rounded once. If
    `chained`, what is added is made of what fusers before have made, else of the model's own rows."""

    def one(side: str, layer: int, rows: Tensor) -> Tensor:
        pairs = [pair for pair in zip(fusers, others, strict=True) if pair[0].open(side, layer)]
        if not pairs:
            return rows
        made = clean = _flat(rows)
        for fuser, other in pairs:
            made = made + fuser.added(side, layer, made if chained else clean, other)
        return made.view(rows.shape[1], rows.shape[0], rows.shape[2]).transpose(0, 1).to(rows.dtype)

    return [(one("k", layer, k), one("v", layer, v)) for layer, (k, v) in enumerate(own)]


def _flat(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).flatten(1).float()


class Fusing(Handing):
    """Whatever it knows of a request, its readers hold; that its rows have been fused, its KV says
    (`KV.approximate`)."""

    def __init__(self, knobs: C2C, host: Host, sharers: Sequence[tuple[Model, Fuser]]) -> None:
        super().__init__(host, knobs.then)
        self.chained = knobs.several == "sequential"
        self.fusers = [fuser for _, fuser in sharers]
        self.readers = [PromptReader(host, f"{NAME}.{i}", model, knobs.piece) for i, (model, _) in enumerate(sharers)]
        for reader in self.readers:
            reader.companion.done = lambda request: self._until(request) is None

    def given(self, request: Request, left: Callable[[str], RetainedKV | None]) -> InjectedKV | None:
        until = self._until(request)
        if until is None:
            return None
        request.recalled = 0
        for reader in self.readers:
            reader.follow(request, request.computed)
        if request.computed < until:
            return None
        assert request.kv is not None
        parts = [layer.read()[0] for layer in request.kv.layers]
        rows = fuse(self.fusers, [part.between(0, until) for part in parts], self.theirs(request, until), self.chained)
        for reader in self.readers:
            reader.forget(request)
        request.recalled = until
        return InjectedKV(rows, False, 0)

    def theirs(self, request: Request, stop: int) -> list[Rows]:
        """Each sharer's rows of the first tokens."""
        return [reader.rows(request, 0, stop) for reader in self.readers]

    @staticmethod
    def _until(request: Request) -> int | None:
        """The number of rows to be fused; None: none, or they have been."""
        fused = request.kv is not None and request.kv.approximate
        return None if fused or not request.prefilling or request.prompt_len < 2 else request.prompt_len - 1

    def rows(self, request: Request) -> int:
        until = self._until(request)
        return super().rows(request) if until is None else until - request.computed

    def own(self, request: Request, budget: int, phase: Phase) -> Span | None:
        until = self._until(request)
        return None if until is None else following(request, budget, until, phase)
