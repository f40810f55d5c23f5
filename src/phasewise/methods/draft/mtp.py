"""A module trained to go on with the model's last state guesses ahead (MTP of DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.methods.draft._feature_tree import FeatureTree


@dataclass(frozen=True)
class MTPModule(FeatureTree):
    """A chain of `depth` guesses by one whole layer, which reads the model's last state and the next token's embedding,
    each after a norm of its own; the model's output head reads what comes out. For each further guess the same module
    goes on with its own output. With `width` > 1 the guesses are EAGLE-2's tree, as `draft.eagle` has it.

    `heads`: `auto`, a folder beside the model or else the module that its own checkpoint carries; a folder in the
    layout of vLLM's `speculators` (mtp), or with the module's tensors as a checkpoint names them (Qwen3-Next's
    `mtp.*`, DeepSeek-V3's `model.layers.N.eh_proj` and so on, MiMo's `model.mtp_layers.0.*`); or `random:SEED`. The
    state is the one after the final norm, as vLLM hands it on. Guesses are chosen, not
    drawn. Left out: several modules, one for each further guess; modules that are mixtures of experts.
    """

    depth: int = 2
    width: int = 1

    paper: ClassVar[str] = "arXiv 2412.19437"
    name: ClassVar[str] = "mtp"
    kinds: ClassVar[tuple[str, ...]] = ("mtp",)
