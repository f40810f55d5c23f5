"""Feature heads as a companion without an engine: what their tests compare with a plain forward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.features import FeatureCompanion, Features
from phasewise.speculation.heads.group_drafter import GroupCompanion
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.speculation.one_pass import MaskedBlock, MaskedTail, OnePassCompanion
from phasewise.step.forward import forward
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from tests import tiny, uncached

KINDS, ONE_PASS = ("eagle3", "eagle1", "mtp", "fspad"), ("peagle", "dflash")
LAYERS, D = 8, 48  # of the target
C = TypeVar("C", bound=FeatureCompanion)


@cache
def target() -> Model:
    """The tiny model of so many layers that published taps lie in it."""
    return tiny.model(layers=LAYERS)


def lane(folder: Path | str, model: Model) -> FeatureCompanion:
    """The heads of a folder, or of another source, as the companion of a model."""
    return lane_of(folder, model, KINDS, FeatureCompanion)


def one_pass_lane(folder: Path | str, model: Model, guesses: int) -> OnePassCompanion:
    """Heads that guess so many tokens in one pass, likewise."""
    kind = MaskedBlock if feature_heads(model, ONE_PASS, str(folder))[0].features_cached else MaskedTail
    return lane_of(folder, model, ONE_PASS, kind).guessing(guesses)


def group_lane(folder: Path | str, model: Model) -> GroupCompanion:
    """Heads that guess several tokens a pass and go on from these, likewise."""
    return lane_of(folder, model, ("falcon",), GroupCompanion)


def lane_of(folder: Path | str, model: Model, kinds: Sequence[str], kind: type[C]) -> C:
    heads, key = feature_heads(model, kinds, str(folder))
    made, counters = FeatureModel(heads, model, key), Counters()
    store = Store(kv_shapes(made), Raw(), ledger=Ledger(1 << 30), counters=counters)
    companion = kind("lane", made, store, uncached.PLAIN, counters)
    companion.follow(Features("lane features", key, made.width, made.dtype, made.features))
    return companion


def noted(companion: FeatureCompanion, request: Request) -> None:
    """Run the target over all tokens of a request but the last, and let its features be noted."""
    model = companion.model.target
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 40), counters=Counters())
    tokens = request.tokens[:-1]
    request.kv = store.open(request, len(tokens))
    span = Span(request, request.kv, uncached.PLAIN, tokens, range(len(tokens)))
    hidden = forward(model, [span], Counters(), companion.model.layers_tapped)
    companion.features.learn([span], hidden, [Outcome(len(tokens), [])])


def near(got: Tensor, wanted: Tensor) -> None:
    assert not torch.isnan(got).any()
    there = wanted.isfinite()
    torch.testing.assert_close(got[there], wanted[there], atol=2e-4, rtol=2e-4)
    assert bool((got[~there] < -1e3).all()), "tokens outside the draft vocabulary are not likely"


def changed(folder: Path, config: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
    """The same files with other settings, and tensors (`__` is a dot) changed, added or taken away."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    held = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in tensors.items()}
    save_file({name: t for name, t in held.items() if t is not None}, folder / "model.safetensors")
    return folder
