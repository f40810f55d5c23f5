"""Hidden Transfer's maps as a tiny file, and their forward written a second time in plain torch.

Nothing of phasewise is imported here but the target's oracle, which imports nothing either.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import oracle, tiny
from tests.speculation.eagle_files import matrices, save


def tiny_maps(path: Path, *, d: int = 48, maps: int = 3, layer: Any = 2, seed: int = 1, **more: Any) -> Path:
    """Random ones for the tiny model, in the layout in which maps are written here."""
    tensors = matrices(seed, **{f"maps__{i}__weight": (d, d) for i in range(maps)})
    config = {"speculators_model_type": "hidden_transfer", "hidden_size": d, "vocab_size": tiny.VOCAB,
              "num_maps": maps, "transfer_layer": layer}  # fmt: skip
    return save(path, config | more, tensors)


class PlainTransfer:
    """The maps of a folder in the target of another, without a cache: every row is computed anew."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.target, config = target, json.loads((folder / "config.json").read_text())
        self.layer, w = config["transfer_layer"], load_file(folder / "model.safetensors")
        self.maps = [w[f"maps.{i}.weight"].float() for i in range(config["num_maps"])]

    @torch.inference_mode()
    def logits(self, text: Sequence[int]) -> Tensor:
        """What the pseudo rows of a text's last token say, [maps, V]. They stand behind it in the later layers, and
        rows of the text see none of them, for they come later."""
        rows = oracle.states(self.target, text)[self.layer]
        pseudo = torch.stack([w @ rows[-1] for w in self.maps])
        out = oracle.onward(self.target, torch.cat((rows, pseudo)), self.layer)[-1][-len(self.maps) :]
        return oracle.unembedded(self.target, oracle.last(self.target, out))
