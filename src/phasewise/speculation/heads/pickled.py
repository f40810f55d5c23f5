"""Medusa's and Hydra's own files, `medusa_lm_head.pt` and `hydra_lm_head.pt`, and EAGLE's `pytorch_model.bin`, made
into folders of heads.

Nothing but tensors is read of a pickled file (`weights_only`), and only by this conversion: a server never opens one.
Medusa numbers the parts of a head: `HEAD.BLOCK.linear.weight`, then `HEAD.BLOCKS.weight` for its output matrix, which
older files leave to the model. Hydra has `hydra_mlp.HEAD.PART.linear`, `.res_connection` in the first block, and
`hydra_lm_head.HEAD`; parts are numbered with or without dropout between them. Hydra++'s `prefix_embeding_layer` is a
model of one layer, whose embeddings nobody reads. EAGLE's tensors keep their names, and the
config.json beside them is theirs.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from phasewise.errors import UserError
from phasewise.speculation.heads.folder import PICKLED, read_config, write
from phasewise.speculation.heads.hydra import HydraHeads, HydraShape
from phasewise.speculation.heads.hydra_layout import PREFIX_LAYER
from phasewise.speculation.heads.last_state import LastStateHeads
from phasewise.speculation.heads.medusa import MedusaHeads, MedusaShape

MEDUSA = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
HYDRA = re.compile(r"(?:hydra_head\.)?hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
HYDRA_OUT = re.compile(r"(?:hydra_head\.)?hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)")
EAGLE = ("fc.", "midlayer.")  # what some of its tensors' names begin with
PREFIX = re.compile(r"(?:hydra_head\.)?prefix_embeding_layer\.(.+)")  # of Hydra++, as the files spell it
UNUSED = ("embed_tokens.weight", "rotary_emb.inv_freq")  # what else the class of that layer has


def convert(source: Path, out: Path, vocab: int | None) -> str:
    """Write the heads of a file, or of a folder that has one, to the folder `out`, in the dtype of the file. Returns
    the drafter that they are for. `vocab`: that of their model, where heads have no output matrix to tell it.

    Raises UserError for files that hold anything but tensors, or other tensors than those of Medusa, Hydra or EAGLE.
    """
    path = _file(source)
    tensors = _tensors(path)
    if any(name.startswith(EAGLE) for name in tensors):
        write(out, read_config(path.parent), {name: value.clone() for name, value in tensors.items()})
        return "eagle"
    made, named = _read(path, tensors, vocab)
    shapes = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    for name, shape in sorted(shapes.items()):
        found = tuple(named[name].shape) if name in named else "absent"
        if found != shape:
            raise UserError(f"{path}: {name} would be {shape} and is {found}: the file is not whole")
    dtype = next(iter(named.values())).dtype
    config = made.config() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    kept = [*shapes, *(name for name in named if name.startswith(PREFIX_LAYER))]
    write(out, config, {name: named[name].clone() for name in kept})  # blocks of some files share their memory
    return made.kind


def _read(path: Path, tensors: Mapping[str, Tensor], vocab: int | None) -> tuple[LastStateHeads, dict[str, Tensor]]:
    """Heads without values of the shape that a file has, and its tensors by their names."""
    if any(HYDRA.fullmatch(name) for name in tensors):
        return _hydra(path, tensors, vocab)
    if any(MEDUSA.fullmatch(name) for name in tensors):
        return _medusa(path, tensors, vocab)
    raise UserError(f"{path} holds neither Medusa's nor Hydra's nor EAGLE's heads; its first tensors are "
                    f"{', '.join(sorted(tensors)[:3]) or 'none'}")  # fmt: skip


def _file(source: Path) -> Path:
    if source.is_dir():
        found = sorted(path for pattern in (*PICKLED, "*.safetensors") for path in source.glob(pattern))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise UserError(f"{source}: name the file of the heads; here are {names}")
        return found[0]
    if not source.is_file():
        raise UserError(f"{source}: there is no such file")
    return source


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        held: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} holds more than tensors, and is not read: reading it could run any code") from error
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): it is truncated, or no file of weights") from error
    if not isinstance(held, Mapping) or not all(isinstance(value, Tensor) for value in held.values()):
        raise UserError(f"{path} holds no table of tensors by name")
    return {str(name): value for name, value in held.items()}


def _vocab(path: Path, output: Tensor | None, vocab: int | None) -> int:
    """The vocabulary by the output matrices, or as given."""
    if output is None and vocab is None:
        raise UserError(f"{path}: these heads have no output matrices, so their model has to say how large its "
                        "vocabulary is: add --for MODEL")  # fmt: skip
    size = vocab if output is None else len(output)
    if vocab is not None and size != vocab:
        raise UserError(f"{path}: these heads are over {size:,} tokens, the model has {vocab:,}")
    assert size is not None
    return size


def _medusa(path: Path, tensors: Mapping[str, Tensor], vocab: int | None) -> tuple[MedusaHeads, dict[str, Tensor]]:
    named: dict[str, Tensor] = {}
    blocks, heads, output = 0, 0, None  # an output matrix
    for name, value in tensors.items():
        found = MEDUSA.fullmatch(name)
        if found is None:
            raise UserError(f"{path}: {name} is no part of Medusa's heads")
        head, part, linear, what = int(found[1]), int(found[2]), found[3], found[4]
        heads = max(heads, head + 1)
        if linear:
            blocks = max(blocks, part + 1)
            named[f"blocks.{head}.layers.{part}.{what}"] = value
        else:
            named[f"lm_heads.{head}.{what}"] = value
            output = value
    width = next(value.shape[-1] for name, value in named.items() if name.endswith("weight"))
    bias = any(name.endswith("bias") for name in named)
    shape = MedusaShape(width, _vocab(path, output, vocab), heads, blocks, output is not None, bias)
    return _empty(lambda: MedusaHeads(shape)), named


def _hydra(path: Path, tensors: Mapping[str, Tensor], vocab: int | None) -> tuple[HydraHeads, dict[str, Tensor]]:
    named = dict(_renamed(path, tensors))
    outputs = {name: value for name, value in named.items() if name.startswith("lm_heads")}
    wide = [name for name in named if name.endswith("linear.up.weight")]
    if not wide:
        raise UserError(f"{path}: no head has its first block: the file is not whole")
    width = len(named[wide[0]])
    layers = 1 + sum(name.startswith("blocks.0.") and name.endswith("weight") for name in named)
    shape = HydraShape(width, _vocab(path, next(iter(outputs.values()), None), vocab), len(wide), layers, bool(outputs),
                       head_bias=any(name.endswith("bias") for name in outputs))  # fmt: skip
    return _empty(lambda: HydraHeads(shape)), named


def _renamed(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Hydra's tensors by the names that they have here."""
    blocks: dict[str, list[int]] = {}  # by head, the numbers of its blocks
    for name in tensors:
        if found := HYDRA.fullmatch(name):
            blocks.setdefault(found[1], []).append(int(found[2]))
    order = {head: sorted(set(numbers)) for head, numbers in blocks.items()}
    for name, value in tensors.items():
        if before := PREFIX.fullmatch(name):
            if not before[1].endswith(UNUSED):
                yield f"{PREFIX_LAYER}{before[1]}", value
        elif out := HYDRA_OUT.fullmatch(name):
            yield f"lm_heads.{out[1]}.{out[2]}", value
        elif found := HYDRA.fullmatch(name):
            block = order[found[1]].index(int(found[2]))
            part = "linear" if found[3] == "linear" else "residual"
            where = f"blocks.{found[1]}.layers.{block - 1}" if block else f"wide.{found[1]}.{part}.up"
            yield f"{where}.{found[4]}", value
        else:
            raise UserError(f"{path}: {name} is no part of Hydra's heads")


def _empty(make: Any) -> Any:
    with torch.device("meta"):
        made: nn.Module = make()
    return made
