"""A model that is another one with low-rank weights added: FILE in a folder, over the model in the folder beside it.

Each matrix is W + B A, computed once while it is read; what comes out is a plain model, as fast as its base. The file
has tensors by the names of `lowrank.shapes`, and in its metadata the `over` and the fingerprint of its `base`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from torch import Tensor

from phasewise.errors import UserError, WeightsError
from phasewise.gguf.blocks import BlockMatrix
from phasewise.model.config import ModelConfig
from phasewise.model.directory import Directory
from phasewise.model.fingerprint import fingerprint
from phasewise.model.layout import layout
from phasewise.model.parse import parse_config
from phasewise.model.raw import RawConfig
from phasewise.model.weights import Tensors
from phasewise.ops.native.weights import DenseRows
from phasewise.version import __version__

FILE = "delta.safetensors"


class MergedLoRA:
    """The files of one. Settings and vocabulary are the base's; special tokens and templates its own, where it has any.

    Raises UserError where the file names no base beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = self.folder = path
        self.base, self.own = Directory(base_of(path / FILE)), Directory(path)

    def settings(self) -> RawConfig:
        raw, end = self.base.settings(), self.own.special().get("eos_token")
        if end is None or end == self.base.special().get("eos_token"):
            return raw
        found = self.tokenizer().token_to_id(end)
        ends = raw.values["eos_token_id"]
        return (
            raw
            if found is None or found in ends
            else RawConfig({**raw.values, "eos_token_id": [*ends, found]}, raw.path)
        )

    def generation(self) -> dict[str, Any]:
        return self.own.generation() or self.base.generation()

    def tensors(self) -> Merged:
        return Merged(self.base, self.path / FILE)

    def tokenizer(self) -> Backend:
        return self.base.tokenizer()

    def special(self) -> dict[str, str]:
        return self.own.special() or self.base.special()

    def templates(self) -> dict[str, str]:
        return self.own.templates() or self.base.templates()

    def stamp(self) -> tuple[Any, ...]:
        return self.base.stamp() + self.own.stamp()


class Added:
    """A checkpoint's tensors with low-rank weights added, in the dtype they would have been read in.

    `delta`: a [rank, in] and b [out, rank] of `<layer>.<linear>`, which must fit the model.
    """

    def __init__(self, tensors: Tensors, config: ModelConfig, delta: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.tensors, self._delta = tensors, delta
        self.where = tensors.where
        self._parts: dict[str, tuple[str, int]] = {}  # a matrix -> what changes it, and from which row on
        for key, parts in layout(config).items():
            row = 0
            for name, shape in parts:
                self._parts[name] = (key, row)
                row += shape[0]

    @property
    def directory(self) -> Path:
        return self.tensors.directory

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors.dtype(name)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self.tensors.read(name, dtype)
        key, row = self._parts.get(name, ("", 0))
        if key not in self._delta:
            return tensor
        a, b = self._delta[key]
        change = b[row : row + tensor.shape[0]].double() @ a.double()  # exact enough to round alike everywhere
        return change.add_(tensor).to(dtype or tensor.dtype)

    def rows(self, name: str, dtype: torch.dtype) -> DenseRows:
        changed = self._parts.get(name, ("", 0))[0] in self._delta
        return self.read(name, dtype) if changed else self.tensors.rows(name, dtype)

    def blocks(self, name: str) -> BlockMatrix | None:
        return None if self._parts.get(name, ("", 0))[0] in self._delta else self.tensors.blocks(name)

    def let_go(self, tensor: Tensor) -> None:
        self.tensors.let_go(tensor)


class Merged(Added):
    """The base's tensors with what was learned added.

    Raises WeightsError for a file that is for other weights than the base's, or of other shapes.
    """

    def __init__(self, base: Directory, path: Path) -> None:
        self.path = path
        tensors, config = base.tensors(), parse_config(base.settings())
        wanted, found = about(path).get("base"), fingerprint(config, tensors)
        if wanted != found:
            raise WeightsError(f"{path} was made for other weights ({wanted}) than those in {base.path} ({found}).")
        delta = _read(path)
        sizes = {key: (sum(s[0] for _, s in parts), parts[0][1][-1]) for key, parts in layout(config).items()}
        for key, (a, b) in delta.items():
            if key not in sizes or (b.shape[0], a.shape[1]) != sizes[key] or a.shape[0] != b.shape[1]:
                raise WeightsError(f"{path}: {key} does not fit the model in {base.path}: {list(b.shape)} by "
                                   f"{list(a.shape)}, wanted {sizes.get(key, 'nothing')}.")  # fmt: skip
        super().__init__(tensors, config, delta)

    @property
    def directory(self) -> Path:
        return self.path.parent


def save(path: Path, delta: Mapping[str, Tensor], told: Mapping[str, str]) -> None:
    """Write low-rank weights in bfloat16; `told`: the `base`, what it is `over`, and the command that made it."""
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in delta.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(stored, path, metadata={"format": "pt", "phasewise": __version__, **told})
    path.chmod(0o644)  # as other files of a model, which whoever runs it may read


def base_of(file: Path) -> Path:
    """The folder that a file says it is `over`, beside its own. Raises UserError where there is no such thing."""
    folder, over = file.parent, about(file).get("over", "")
    if over != Path(over).name or over in ("", ".", ".."):
        raise UserError(f"{file}: its metadata must name the folder beside {folder.name} that holds its base (over), "
                        f"not {over!r}")  # fmt: skip
    if not (folder.parent / over).is_dir():
        raise UserError(f"{file} is for the model in {folder.parent / over}, and nothing is there")
    return folder.parent / over


def about(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a readable safetensors file ({error}).") from error


def _read(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """`<layer>.<linear>` -> a [rank, in] and b [out, rank]."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for key in {name.rpartition(".")[0] for name in tensors}:
        pair = [tensors.pop(f"{key}.{part}", None) for part in "ab"]
        if any(part is None or part.ndim != 2 for part in pair):
            raise WeightsError(f"{path}: {key or 'a tensor'} is no pair of matrices {key}.a and {key}.b.")
        pairs[key] = (pair[0], pair[1])
    if tensors:
        raise WeightsError(f"{path}: {', '.join(sorted(tensors))} are no low-rank weights.")
    return pairs
