"""From names the user typed to models: known ones, directories, files, hub ids; and dtypes."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from phasewise.errors import UserError, near
from phasewise.known import shelf
from phasewise.known.bar import Say
from phasewise.known.fetch import fetch
from phasewise.known.models import EMBEDDED, KNOWN, every
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.rounded import RoundedTensors
from phasewise.model.source import Source, source
from phasewise.model.weights import kept_form
from phasewise.model.weights_form import loaded_form

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def model_path(name: str, *, say: Say = log.info) -> str:
    """Finds the model called `name`: a directory, a `.gguf` file, or a hub id.

    A known model (`phasewise models`) is fetched if it is not here; a directory of that name is `./NAME`. `say` gets a
    line per stage of fetching where there is no terminal for a bar. Whatever else could be a path or a hub id stays as
    given. Raises UserError for a known model that cannot be had, and for a bare word that is neither known nor a path.
    """
    if name in EMBEDDED:
        return str(shelf.place(EMBEDDED[name]))
    if name in KNOWN:
        return str(fetch(KNOWN[name], say=say))
    if not {"/", os.sep} & set(name) and not Path(name).expanduser().exists():
        raise UserError(f"no model is known as {name!r}, and there is no such path. {near(name, every())} Or pass the "
                        "path of a checkpoint, or a hub id like org/name.")  # fmt: skip
    return name


def files_of(name: str) -> Source:
    """The files of the model called `name`. Raises UserError if there are none."""
    return source(model_path(name))


def config_of(name: str) -> ModelConfig:
    """The architecture of the model called `name`; its weights are not read."""
    return parse_config(files_of(name).settings())


def weight_bytes(name: str, dtype: str | None, weights: str | None = None) -> int:
    """Bytes of the weights of the model called `name`: the sum of `weight_forms`."""
    return sum(found.nbytes for found in weight_forms(name, dtype, weights).values())


BESIDE = "low-rank, bfloat16"  # weights beside others, as a form of `weight_forms`


class FormBytes(NamedTuple):
    """What is kept in one form: tensors, their numbers, and the bytes that they take."""

    tensors: int = 0
    numbers: int = 0
    nbytes: int = 0


def weight_forms(name: str, dtype: str | None, weights: str | None = None) -> dict[str, FormBytes]:
    """How the weights of the model called `name` are kept in a dtype (None: the checkpoint's own), by the name of the
    form, told by the shapes of its tensors; `weights`: a form that they are rounded into.

    A known model is fetched for it, and nothing is loaded. Tied embeddings count once.
    """
    files, chosen, form = files_of(name), dtype_of(dtype), loaded_form(weights)
    tensors = files.tensors()
    if form is not None:
        tensors = RoundedTensors(tensors, parse_config(files.settings()), form)
    half, int8 = chosen in (None, torch.bfloat16, torch.int8), chosen == torch.int8
    found: dict[str, FormBytes] = {}
    besides: dict[int, torch.Tensor] = {}  # by identity, which holds while they are kept here
    for each in tensors.where:
        kept, count = kept_form(tensors, each, int8=int8) if half else None, math.prod(tensors.shape(each))
        if kept is None:
            own = chosen or tensors.dtype(each)
            kind, size = str(own).removeprefix("torch."), count * own.itemsize
        else:
            kind, size = kept[1].kind, kept[1].raw.nbytes
        before = found.get(kind, FormBytes())
        found[kind] = FormBytes(before.tensors + 1, before.numbers + count, before.nbytes + size)
        for part in () if kept is None or kept[1].beside is None else kept[1].beside:
            if id(part) in besides:  # parts of one layer share one
                continue
            besides[id(part)] = part
            before = found.get(BESIDE, FormBytes())
            size = part.numel() * torch.bfloat16.itemsize
            found[BESIDE] = FormBytes(before.tensors + 1, before.numbers + part.numel(), before.nbytes + size)
    return found


def dtype_of(name: str | None) -> torch.dtype | None:
    """None keeps the checkpoint's dtype. Raises UserError for an unknown name."""
    if name is None:
        return None
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}. {near(name, DTYPES)}")
    return DTYPES[name]


def load_model(
    name: str, *, dtype: torch.dtype | None = None, device: str = "cpu", weights: str | None = None
) -> Model:
    """The model called `name`; `weights`: a form that its layers are rounded into, such as int4:group=64.

    Raises UserError naming what does not fit, an unusable device included.
    """
    form = loaded_form(weights)
    return Model.load(model_path(name), dtype=dtype, device=usable(device), form=form)


def usable(device: str) -> torch.device:
    """The device of this name. Raises UserError if nothing can be computed there.

    From then on cuDNN's attention is not taken on a GPU: it plans anew for every length of keys, half a second each.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's own words are pages long
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"device {device!r} cannot be used ({reason}). Say cpu, or cuda where a GPU is.") from error
    found = torch.device(device)
    if found.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return found
