"""From names the user typed to models: embedded ones, directories, hub ids; and dtypes."""

from __future__ import annotations

from importlib.resources import files

import torch

from phasewise.errors import UserError, near
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.source import Source, source

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
EMBEDDED = {"pocket": "target", "pocket-draft": "draft"}  # models that ship with the package


def model_path(name: str) -> str:
    """A directory, a .gguf file or a hub id as given, or the directory of an embedded model."""
    if name not in EMBEDDED:
        return name
    return str(files("phasewise").joinpath("pocket", EMBEDDED[name]))


def files_of(name: str) -> Source:
    """The files of the model called `name`. Raises UserError if there are none."""
    return source(model_path(name))


def config_of(name: str) -> ModelConfig:
    """The architecture of the model called `name`; its weights are not read."""
    return parse_config(files_of(name).settings())


def dtype_of(name: str | None) -> torch.dtype | None:
    """None keeps the checkpoint's dtype. Raises UserError for an unknown name."""
    if name is None:
        return None
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}. {near(name, DTYPES)}")
    return DTYPES[name]


def load_model(name: str, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Model:
    """The model called `name`. Raises UserError naming what does not fit, an unusable device included."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's own words are pages long
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"device {device!r} cannot be used ({reason}). Say cpu, or cuda where a GPU is.") from error
    return Model.load(model_path(name), dtype=dtype, device=device)
