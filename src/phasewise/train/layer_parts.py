"""Where a conversion that goes layer by layer keeps what is done, and what its texts bring to the next layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from phasewise.errors import UserError


class LayerParts:
    """Files of a folder: one for each layer that is converted, and one of hidden states, of the last of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def done(self, layers: int) -> int:
        """The number of layers that have a file, from the first on."""
        return next(i for i in range(layers + 1) if not self.part(i).is_file())

    def part(self, index: int) -> Path:
        return self.folder / f"layer-{index:05}.safetensors"

    def keep_hidden(self, index: int, hidden: Sequence[Tensor]) -> None:
        """Write what the texts bring to a layer."""
        save_whole(self._hidden(index), {str(i): x for i, x in enumerate(hidden)})

    def hidden(self, index: int) -> list[Tensor]:
        """The rows that the texts bring to a layer. Raises UserError where it is not kept."""
        if not self._hidden(index).is_file():
            raise UserError(f"{self._hidden(index)} is missing, and the conversion cannot go on without: remove "
                            f"{self.folder}, and begin again without --resume")  # fmt: skip
        found = load_file(self._hidden(index))
        return [found[str(i)] for i in range(len(found))]

    def forget_hidden(self, index: int) -> None:
        self._hidden(index).unlink(missing_ok=True)

    def _hidden(self, index: int) -> Path:
        return self.folder / f"hidden-{index:05}.safetensors"


def save_whole(path: Path, tensors: Mapping[str, Tensor], told: dict[str, str] | None = None) -> None:
    """Write a file that is there whole or not at all."""
    fresh = path.with_suffix(".new")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, fresh, told)
    fresh.replace(path)
