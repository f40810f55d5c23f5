"""A model that is another one with some of its tensors exchanged: FILE in a folder, over the model in the folder beside
it, and a config.json of its own. What comes out is a plain model; all else is read from the base.

The file's metadata has what it is `over`, the fingerprint of its `base` and the `command` that made it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from torch import Tensor

from phasewise.errors import WeightsError
from phasewise.gguf.blocks import BlockMatrix
from phasewise.model.directory import Directory
from phasewise.model.fingerprint import fingerprint
from phasewise.model.parse import parse_config
from phasewise.model.raw import RawConfig
from phasewise.model.tuned import about, base_of
from phasewise.model.weights import Checkpoint, Tensors
from phasewise.ops.native.weights import DenseRows
from phasewise.version import __version__

FILE = "instead.safetensors"


class Instead:
    """The files of one. Vocabulary, special tokens and templates are the base's.

    Raises UserError where the file names no base beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = self.folder = path
        self.base, self.own = Directory(base_of(path / FILE)), Directory(path)

    def settings(self) -> RawConfig:
        return self.own.settings()

    def generation(self) -> dict[str, Any]:
        return self.own.generation() or self.base.generation()

    def tensors(self) -> Exchanged:
        return Exchanged(self.base, self.path)

    def tokenizer(self) -> Backend:
        return self.base.tokenizer()

    def special(self) -> dict[str, str]:
        return self.base.special()

    def templates(self) -> dict[str, str]:
        return self.base.templates()

    def stamp(self) -> tuple[Any, ...]:
        return self.base.stamp() + self.own.stamp()


class Exchanged:
    """The folder's own tensors, and the base's where it has none. Raises WeightsError for one that was made from other
    weights than the base's."""

    def __init__(self, base: Directory, directory: Path) -> None:
        self.directory = directory
        self._own, self._base = Checkpoint(directory), base.tensors()
        self.where = {**self._base.where, **self._own.where}
        wanted, found = about(directory / FILE).get("base"), fingerprint(parse_config(base.settings()), self._base)
        if wanted != found:
            raise WeightsError(f"{directory / FILE} was made from other weights ({wanted}) than those in {base.path} "
                               f"({found}).")  # fmt: skip

    def _of(self, name: str) -> Tensors:
        return self._own if name in self._own.where else self._base

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype(name)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._of(name).read(name, dtype)

    def rows(self, name: str, dtype: torch.dtype) -> DenseRows:
        return self._of(name).rows(name, dtype)

    def blocks(self, name: str) -> BlockMatrix | None:
        return self._of(name).blocks(name)

    def let_go(self, tensor: Tensor) -> None:
        self._own.let_go(tensor)
        self._base.let_go(tensor)


def save(folder: Path, base: Directory, made: Directory, command: str) -> int:
    """Write what differs in `made` from the model `base`, which must lie beside `folder` when it is read. -> bytes"""
    before, now = base.tensors(), made.tensors()
    changed = {name: now.read(name) for name in now.where if not _same(name, now, before)}
    folder.mkdir(parents=True, exist_ok=True)
    told = {"base": fingerprint(parse_config(base.settings()), before), "over": base.path.name, "command": command}
    save_file(changed, folder / FILE, metadata={"format": "pt", "phasewise": __version__, **told})
    (folder / FILE).chmod(0o644)  # as other files of a model, which whoever runs it may read
    settings = json.dumps(made.settings().values, indent=2) + "\n"
    (folder / "config.json").write_text(settings, encoding="utf-8")
    return sum(tensor.nbytes for tensor in changed.values())


def _same(name: str, now: Tensors, before: Tensors) -> bool:
    return name in before.where and now.shape(name) == before.shape(name) and now.read(name).equal(before.read(name))
