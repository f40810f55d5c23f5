"""Artefacts that were trained for a method and a model: declared by the method, found, checked, or refused by name.

An artefact is a safetensors file bound to one base model (`fingerprint`) and to the knobs it was trained for. It lies
in `phasewise/` beside the model's own files, or is named. Methods ask for theirs with `host.artefact`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phasewise.errors import Untrained, UserError
from phasewise.model.fingerprint import fingerprint as fingerprint_of
from phasewise.model.source import source
from phasewise.version import __version__

if TYPE_CHECKING:
    from phasewise.model.config import ModelConfig
    from phasewise.model.model import Model

FOLDER = "phasewise"  # beside a model's own files
RANDOM = "random:"


@dataclass(frozen=True)
class Artefact:
    """The tensors that a method needs of a model: names and shapes, and the knobs that they were or would be trained
    for.

    A trainable method has `artefact(config) -> Artefact`, and `train/artefacts/<verb>_<name>.py` makes it.
    """

    kind: str  # verb.name of the method
    shapes: Mapping[str, tuple[int, ...]]
    knobs: Mapping[str, int | float | str] = field(default_factory=dict)
    without: str = ""  # what else the user may do; ends the error about a missing one
    partner: str = ""  # the fingerprint of a second model that it goes with, if there is one

    @property
    def setting(self) -> str:
        """The method as the command line writes it, `verb.name:knob=value`."""
        knobs = ",".join(f"{knob}={_short(value)}" for knob, value in self.knobs.items())
        return self.kind + (f":{knobs}" if knobs else "")

    @property
    def file(self) -> str:
        words = (f"{knob}{_short(value).rpartition('/')[2].replace(':', '')}" for knob, value in self.knobs.items())
        return "-".join([self.kind, *words]) + ".safetensors"

    def command(self, model: str) -> str:
        """The command that trains it for the model of this name or directory."""
        return f"phasewise train artefact {self.setting} --model {model} --out runs/{self.kind}"


def load(model: Model, wanted: Artefact, weights: str) -> dict[str, Tensor]:
    """The tensors of `wanted` for this model, as they were stored.

    `weights`: `auto` (beside the model, else what the package ships for it), a file, or `random:SEED`, which makes
    some of the right shapes. Raises UserError naming the file, what is wrong with it, and the command that trains one.
    """
    if weights.startswith(RANDOM):
        return random(wanted, weights.removeprefix(RANDOM))
    if weights != "auto":
        path = Path(weights).expanduser()
        if not path.is_file():
            raise UserError(f"{wanted.kind}: weights={weights}: no such file. Choose auto or random:SEED, or train "
                            f"one: {wanted.command(str(model.files.path))}")  # fmt: skip
        return _read(path, model, wanted)
    beside = model.files.folder / FOLDER / wanted.file
    if beside.is_file():
        return _read(beside, model, wanted)
    base = fingerprint(model)
    for path in _shipped(wanted.file):
        if _about(path, _train(wanted, model)).get("base") == base:
            return _read(path, model, wanted)
    raise Untrained(
        f"{wanted.setting} needs weights trained for the model in {model.files.path}; there are none at {beside} and "
        f"none are shipped for it. Train them: {wanted.command(str(model.files.path))}"
        + (f"; or {wanted.without}" if wanted.without else "")
    )


def random(wanted: Artefact, seed: str) -> dict[str, Tensor]:
    """Normal values of the declared shapes, float32, of variance 1 / columns: nothing learned, but at work."""
    if not seed.isdecimal():
        raise UserError(f"{wanted.kind}: weights={RANDOM}{seed}: the seed must be a whole number, as in random:0")
    out = {}
    for name, shape in wanted.shapes.items():
        digest = hashlib.sha256(f"{seed} {wanted.kind} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        out[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return out


def save(path: Path, made: Artefact, tensors: Mapping[str, Tensor], base: str, command: str) -> None:
    """Write an artefact in bfloat16; `base`: the fingerprint of the model it was trained for."""
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == dict(made.shapes)
    about = {"format": "pt", "kind": made.kind, "base": base, "knobs": json.dumps(dict(made.knobs)),
             "command": command, "phasewise": __version__}  # fmt: skip
    if made.partner:
        about["partner"] = made.partner
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(stored, path, metadata=about)
    path.chmod(0o644)  # as other files of a model, which whoever runs it may read


def setting(path: Path) -> str:
    """The method that a file was trained for, with itself as its weights, as the command line writes it:
    `name:knob=value,weights=FILE`. Raises UserError for a file that is none."""
    about = _about(path, "")
    name = Artefact(about["kind"], {}, json.loads(about["knobs"])).setting.partition(".")[2]
    return f"{name}{',' if ':' in name else ':'}weights={path}"


def fingerprint(model: Model) -> str:
    """The fingerprint of a base model (`model.fingerprint`); computed once for the files as they are."""
    return _fingerprint(model.files.path, model.files.stamp(), model.config)


@lru_cache(maxsize=16)
def _fingerprint(path: Path, stamp: tuple[Any, ...], config: ModelConfig) -> str:
    return fingerprint_of(config, source(path).tensors())


def _shipped(name: str) -> list[Path]:
    package = Path(str(files("phasewise")))
    return sorted(package.glob(f"pocket/*/{FOLDER}/{name}")) + sorted(package.glob(f"known/*/{FOLDER}/{name}"))


def _train(wanted: Artefact, model: Model) -> str:
    return f"Train one: {wanted.command(str(model.files.path))}"


def _about(path: Path, train: str) -> dict[str, str]:
    """The metadata of an artefact. Raises UserError, which ends in `train`, for a file that is none."""
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}). {train}") from error
    if not {"kind", "base", "knobs"} <= about.keys():
        raise UserError(f"{path} is no artefact of phasewise: its metadata names no kind, base and knobs. {train}")
    return about


def _read(path: Path, model: Model, wanted: Artefact) -> dict[str, Tensor]:
    """The tensors of a file, which must be what is wanted, for this very model."""
    train = _train(wanted, model)
    about = _about(path, train)
    if about["kind"] != wanted.kind:
        raise UserError(f"{path} was trained for {about['kind']}, not for {wanted.kind}. {train}")
    mine = fingerprint(model)
    if about["base"] != mine:
        raise UserError(f"{path} was trained for another base model ({about['base']}) than the one in "
                        f"{model.files.path} ({mine}). {train}")  # fmt: skip
    if wanted.partner and about.get("partner") != wanted.partner:
        raise UserError(f"{path} was trained with another second model ({about.get('partner')}) than this one "
                        f"({wanted.partner}). {train}")  # fmt: skip
    if json.loads(about["knobs"]) != dict(wanted.knobs):
        raise UserError(f"{path} was trained for {about['knobs']}, not for {json.dumps(dict(wanted.knobs))}. {train}")
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != dict(wanted.shapes):
        odd = sorted(name for name in found.keys() | wanted.shapes.keys() if found.get(name) != wanted.shapes.get(name))
        shown = f"{odd[0]} is {found.get(odd[0], 'absent')}, wanted {wanted.shapes.get(odd[0], 'nothing')}"
        raise UserError(f"{path} does not have the tensors that {wanted.setting} needs: {shown}. {train}")
    return tensors


def _short(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
