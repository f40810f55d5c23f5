"""A small auxiliary model reads the prompt, and learned maps make the model's own keys and values of what it has cached
(KV Prediction, arXiv 2410.08391).

Promises that the model itself computes one row of a prompt, its last, however long it is; all others have the keys and
values that are predicted for them. What comes after the prompt is decoded over these, plainly or as `then` does.
Answers hang on the weights that were trained for the two models (train/artefacts/decode_kv_prediction.py);
`Output.recalled` says how many rows were predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from phasewise.catalog import part
from phasewise.errors import UserError
from phasewise.kv.retained import InjectedKV, RetainedKV
from phasewise.methods.decode._second import PromptReader, Rows, config_of, second
from phasewise.methods.decode._then import Handing, checked
from phasewise.model.artefacts import Artefact, fingerprint
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.lowrank import shapes
from phasewise.model.model import Model
from phasewise.model.pruned import Pruned, pruned
from phasewise.model.tuned import Added
from phasewise.model.weights import Tensors, Weights
from phasewise.request.request import Request
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "kv_prediction"
RANK = 16  # of what is added to the auxiliary's own weights
AUX = "aux."
OWN = "own:"


@dataclass(frozen=True)
class KVPrediction(Method):
    """`model`: the auxiliary, a second model of the same vocabulary, whose low-rank tuning is part of the weights; or
    `own:SHARE`, the model's own layers, of which it has a share, the first one and others at equal distances, as copies
    in memory. Prompts of fewer than `least` tokens are computed as ever. `piece`: tokens that it reads at once.

    `weights`: `auto` (trained for this pair; beside the model, or shipped), a file, or `random:SEED` (to test with).
    It reads a prompt when the request is let in, of which a scheduler's budget knows nothing. Prompts share no prefix:
    predicted rows save nothing that the auxiliary would not have to read again. `then` decodes what follows the prompt.
    Left out: prompts of several requests in one pass.
    """

    model: str = "pocket-draft"
    least: int = 64
    piece: int = 512
    weights: str = "auto"
    then: Any = part("decode", "autoregressive")

    paper: ClassVar[str] = "arXiv 2410.08391"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"least": ENDLESS}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({},)
    tight: ClassVar[dict[str, object]] = {"least": 2, "piece": 16}

    def __post_init__(self) -> None:
        checked(NAME, self.then)
        for knob, low in (("least", 2), ("piece", 1)):
            if getattr(self, knob) < low:
                raise UserError(f"kv_prediction: {knob}={getattr(self, knob)} must be at least {low} tokens")
        if self.model.startswith(OWN):
            self.share  # noqa: B018 (raises for what is no share)

    @property
    def share(self) -> float | None:
        """The share of the model's own layers that make the auxiliary; None: another model does."""
        if not self.model.startswith(OWN):
            return None
        try:
            share = float(self.model.removeprefix(OWN))
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise UserError(f"kv_prediction: model={self.model}: name a share of the model's own layers above 0 and "
                            f"at most 1, as in {OWN}0.5")  # fmt: skip
        return share

    def kept(self, layers: int) -> list[int]:
        """Which of the model's own layers make the auxiliary."""
        assert self.share is not None
        few = max(1, round(self.share * layers))
        of = layer_map(layers, few)
        return [of.index(j) for j in range(few)]

    def artefact(self, config: ModelConfig, aux: ModelConfig | None = None, partner: str = "") -> Artefact:
        """A map of keys and one of values for each layer, and what is added to the auxiliary's weights."""
        if aux is None:
            aux = config_of(self.model) if self.share is None else pruned(config, self.kept(config.layers))
        width, inner = config.kv_heads * config.head_dim, aux.kv_heads * aux.head_dim
        maps = {f"{side}.weight": (config.layers, width, inner) for side in "kv"}
        biases = {f"{side}.bias": (config.layers, width) for side in "kv"}
        added = {AUX + name: shape for name, shape in shapes(aux, range(aux.layers), RANK).items()}
        return Artefact("decode.kv_prediction", {**maps, **biases, **added}, {"model": self.model}, partner=partner)

    @property
    def traits(self) -> Traits:
        then: Traits = self.then.traits
        said = replace(then, injects_kv=True, base_alone=True, sparse_prompts=True)
        return replace(said, shares_prefix=False, plain_prompts=False)

    def bind(self, host: Host) -> Predicting:
        aux = self._auxiliary(host)
        if aux.config.qk_norm is not None:
            raise UserError(f"kv_prediction: auxiliary {self.model!r} normalises its keys, and they are wanted as they "
                            "were before: choose another one")  # fmt: skip
        for each in (aux.model, host.model):
            lengths = sorted({rope.scheme for rope in each.config.ropes if not rope.fixed})
            if lengths:
                raise UserError(f"kv_prediction: the rope scaling {', '.join(lengths)!r} of {each.files.path} depends "
                                "on the length of the text, so keys cannot be turned: choose another one")  # fmt: skip
        wanted = self.artefact(host.model.config, aux.config, "" if self.share else fingerprint(aux.model))
        return Predicting(self, host, aux, host.artefact(wanted, self.weights))

    def _auxiliary(self, host: Host) -> Auxiliary:
        model = host.model
        if self.share is None:
            return Auxiliary.of(second(host, NAME, "auxiliary", self.model))
        keep = self.kept(model.config.layers)
        return Auxiliary(model, pruned(model.config, keep), Pruned(model.files.tensors(), model.config, keep))


class Auxiliary(NamedTuple):
    """What an auxiliary is made of: a `model` or some layers of it, with that architecture and these tensors."""

    model: Model
    config: ModelConfig
    tensors: Tensors

    @classmethod
    def of(cls, model: Model) -> Auxiliary:
        """All of a model."""
        return cls(model, model.config, model.files.tensors())


def layer_map(layers: int, aux: int) -> list[int]:
    """Which of the auxiliary's layers each layer is predicted from, non-decreasing: all of them alike, the first ones
    once more where the numbers do not divide."""
    if aux >= layers:
        return [i * aux // layers for i in range(layers)]
    each, more = divmod(layers, aux)
    return [j for j in range(aux) for _ in range(each + (j < more))]


def tuned(aux: Auxiliary, tensors: Mapping[str, Tensor]) -> Model:
    """The auxiliary with what was learned added to its weights: a plain model."""
    keys = {name.removeprefix(AUX).rpartition(".")[0] for name in tensors if name.startswith(AUX)}
    delta = {key: (tensors[f"{AUX}{key}.a"], tensors[f"{AUX}{key}.b"]) for key in keys}
    added, model = Added(aux.tensors, aux.config, delta), aux.model
    return Model(aux.config, Weights(added, layout(aux.config), model.dtype, model.device), model.files)


class Maps:
    """A layer's keys and values of the auxiliary's: both before rotation, all heads of a row together, in float32."""

    def __init__(self, model: Model, aux: Model, tensors: Mapping[str, Tensor]) -> None:
        self.model, self.aux = model, aux
        self.of = layer_map(model.config.layers, aux.config.layers)
        self.parts = {
            name: tensors[name].to(model.device, torch.float32) for name in ("k.weight", "k.bias", "v.weight", "v.bias")
        }

    def __call__(self, rows: Rows, start: int) -> Rows:
        """The model's rows of positions `start` and on, of the auxiliary's there."""
        model, count = self.model, rows[0][0].shape[1]
        places = torch.arange(start, start + count, device=model.device)
        keys = [_flat(self.aux.rotate(i, k.float(), -places)) for i, (k, _) in enumerate(rows)]
        values = [_flat(v.float()) for _, v in rows]
        out = []
        for layer, of in enumerate(self.of):
            k, v = self._mapped("k", layer, keys[of]), self._mapped("v", layer, values[of])
            k = model.rotate(layer, self._normed(layer, k).transpose(0, 1), places)  # [H, r, D]
            out.append((k.to(model.dtype), v.transpose(0, 1).to(model.dtype)))
        return out

    def _mapped(self, side: str, layer: int, x: Tensor) -> Tensor:
        """[r, inner] -> [r, H, D]"""
        y = torch.addmm(self.parts[f"{side}.bias"][layer], x, self.parts[f"{side}.weight"][layer].T)
        return y.view(len(x), self.model.config.kv_heads, self.model.config.head_dim)

    def _normed(self, layer: int, k: Tensor) -> Tensor:
        """Keys [r, H, D] as the model normalises its own."""
        norm, heads = self.model.layers[layer].qk_norm, self.model.config.heads
        if norm is None:
            return k
        queries = k.new_zeros(len(k), heads, k.shape[2]).to(self.model.dtype)
        return norm(torch.cat((queries, k.to(self.model.dtype)), 1))[:, heads:].float()


def _flat(x: Tensor) -> Tensor:
    """[H, r, D] -> [r, H * D]"""
    return x.transpose(0, 1).flatten(1)


class Predicting(Handing):
    """Whatever it knows of a request, the reader holds, and gives back before the request's first row."""

    def __init__(self, knobs: KVPrediction, host: Host, aux: Auxiliary, tensors: Mapping[str, Tensor]) -> None:
        small = tuned(aux, tensors)
        super().__init__(host, knobs.then)
        self.knobs = knobs
        self.maps, self.reader = Maps(host.model, small, tensors), PromptReader(host, NAME, small, knobs.piece)
        self.reader.companion.done = lambda request: True  # before a step is made room for

    def given(self, request: Request, left: Callable[[str], RetainedKV | None]) -> InjectedKV | None:
        at, end = request.computed, request.prompt_len - 1
        if at >= end or request.prompt_len < self.knobs.least:
            self.reader.forget(request)
            return None
        stop = request.recalled = self.reader.read(request)
        return InjectedKV(self.maps(self.reader.rows(request, at, stop), at), False)
