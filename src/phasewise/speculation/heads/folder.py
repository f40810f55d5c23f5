"""Folders of trained heads: found, read and checked, or refused by name.

A folder has `config.json` and `model.safetensors`. What phasewise alone writes into the configuration lies under
"phasewise": the fingerprint of the model that the heads were trained for, the command, and what was measured of them.
Heads that others trained have none of that and are held to their sizes. Nothing is ever unpickled here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phasewise.errors import Untrained, UserError
from phasewise.model.artefacts import FOLDER, fingerprint
from phasewise.model.model import Model

CONFIG, WEIGHTS, OWN = "config.json", "model.safetensors", "phasewise"
AUTO, RANDOM = "auto", "random:"
PICKLED = ("*.pt", "*.pth", "*.bin")


@dataclass(frozen=True)
class StoredHeads:
    """A folder that was read: its configuration, and its tensors as they are stored."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def own(self) -> dict[str, Any]:
        """What phasewise wrote into the configuration; empty for heads that others trained."""
        own = self.config.get(OWN)
        return own if isinstance(own, dict) else {}

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number of the configuration, at least 0. Raises UserError if it is none."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"{self.path / CONFIG}: {key}={value!r} must be a whole number")
        return value

    def take(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The tensors of these names, in float32. Raises UserError naming one that is missing or of another shape."""
        for name, shape in shapes.items():
            found = tuple(self.tensors[name].shape) if name in self.tensors else "absent"
            if found != shape:
                raise UserError(f"{self.path / WEIGHTS}: {name} is {found}, and {CONFIG} asks for {shape}")
        return {name: self.tensors[name].to(torch.float32) for name in shapes}


def train_command(kind: str, model: str) -> str:
    """The command that trains such heads for the model of this name or directory."""
    return f"phasewise train heads {kind} --for {model} --out runs/{kind}"


def locate(model: Model, kinds: Sequence[str], heads: str) -> Path:
    """The folder of heads. `heads`: a folder, or `auto`: of the first of these kinds that lies beside the model
    (phasewise/heads/KIND), or that the package ships for it. Raises Untrained where `auto` finds none."""
    if heads != AUTO:
        return Path(heads).expanduser()
    base = fingerprint(model)
    for kind in kinds:
        if (own := beside(model, kind)).is_dir():
            return own
        for path in _shipped(kind):
            if read_config(path).get(OWN, {}).get("base") == base:
                return path
    first = kinds[0]
    raise Untrained(f"{first} needs heads trained for the model in {model.files.path}; there are none at "
                    f"{beside(model, first)} and none are shipped for it. Train them: "
                    f"{train_command(first, str(model.files.path))}; or name a folder: heads=DIR")  # fmt: skip


def beside(model: Model, kind: str) -> Path:
    """Where heads of a kind lie beside a model's own files."""
    return model.files.folder / FOLDER / "heads" / kind


def _shipped(kind: str) -> list[Path]:
    package = Path(str(files("phasewise")))
    return sorted(path for top in ("pocket", "known") for path in package.glob(f"{top}/*/{FOLDER}/heads/{kind}"))


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a folder of heads. Raises UserError for a folder that is none."""
    path = folder / CONFIG
    if folder.is_file():
        raise UserError(f"{folder} is a file: name the folder of the heads. {_converting(folder)}")
    if not folder.is_dir():
        raise UserError(f"heads={folder}: there is no such folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no heads: it has no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object")
    return config


def read(folder: Path) -> StoredHeads:
    """What a folder of heads holds. Raises UserError naming the file that is missing, truncated or pickled."""
    config, path = read_config(folder), folder / WEIGHTS
    if not path.is_file():
        pickled = sorted(file for pattern in PICKLED for file in folder.glob(pattern))
        if pickled:
            raise UserError(f"{pickled[0]} is pickled, and a pickle can run any code. {_converting(pickled[0])}")
        raise UserError(f"{folder} holds no heads: it has no {WEIGHTS}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a readable safetensors file ({error}): it is truncated or no such file"
        ) from error
    return StoredHeads(folder, config, tensors)


def _converting(path: Path) -> str:
    return f"Convert pickled heads first: phasewise convert heads {path} OUT"


def check(stored: StoredHeads, model: Model, kind: str) -> None:
    """Raise UserError unless heads fit a model: its width, its vocabulary and, where they name one, its fingerprint."""
    again = f"Train some for it: {train_command(kind, str(model.files.path))}"
    sizes = {"hidden_size": model.config.hidden, "vocab_size": model.config.vocab}
    for key, its in sizes.items():
        if stored.number(key) != its:
            raise UserError(f"{stored.path}: these heads are for a model with {key}={stored.config[key]}, the one in "
                            f"{model.files.path} has {its}. {again}")  # fmt: skip
    base = stored.own.get("base")
    if base is not None and base != fingerprint(model):
        raise UserError(f"{stored.path}: these heads were trained for another model ({base}) than the one in "
                        f"{model.files.path} ({fingerprint(model)}). {again}")  # fmt: skip


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Write a folder of heads, file by file in the place of what is there. `dtype`: of floating tensors; None: as
    given."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in tensors.items()
    }
    fresh = folder / f"{WEIGHTS}.new"
    save_file(stored, fresh, metadata={"format": "pt"})
    fresh.chmod(0o644)  # as other files of a model, which whoever runs it may read
    os.replace(fresh, folder / WEIGHTS)
    fresh = folder / f"{CONFIG}.new"
    fresh.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, folder / CONFIG)


def seed_of(heads: str) -> int | None:
    """The seed of `random:SEED`; None for anything else. Raises UserError for a seed that is no number."""
    if not heads.startswith(RANDOM):
        return None
    seed = heads.removeprefix(RANDOM)
    if not seed.isdecimal():
        raise UserError(f"heads={heads}: the seed must be a whole number, as in random:0")
    return int(seed)
