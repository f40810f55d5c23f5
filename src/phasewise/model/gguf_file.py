"""A model's GGUF file with its linear layers in few bits: from such a file, or from a checkpoint of a Llama's kind.

A form of weights maps to blocks of 32: int4 to Q4_0, with zeros to Q4_1, int8 to Q8_0, and a scale of more inputs is
repeated. All numbers are those of the form: scales are short enough for float16 to hold Q4_1's minima, -scale * zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasewise.errors import UnsupportedModel
from phasewise.gguf import families
from phasewise.gguf.blocks import Bytes
from phasewise.gguf.checkpoint import GGUFModel
from phasewise.gguf.container import Metadata
from phasewise.gguf.families import Change, GGUFFields, TensorSource
from phasewise.gguf.vocabulary_written import written
from phasewise.gguf.writing import TensorToWrite, write_gguf
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.levels import Levels, matrices
from phasewise.model.parse import parse_config
from phasewise.model.raw import RawConfig
from phasewise.model.rope import Rope
from phasewise.model.source import Source
from phasewise.model.weights import Tensors
from phasewise.model.weights_form import WeightsForm

PREFIX = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # architectures by family
FREQUENCIES = "rope_freqs.weight"
FILE_TYPE = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7}  # general.file_type
NEAR = 1e-6  # relative, of frequencies that went through float32
Find = Callable[[str], Levels]


def block_type(form: WeightsForm) -> str:
    """The type of blocks that a form maps to."""
    return "Q8_0" if form.bits == 8 else "Q4_1" if form.zeros else "Q4_0"


def blocks_of(levels: Levels) -> Bytes:
    """A matrix in levels as blocks of its form's type, uint8 [out, bytes of a row]."""
    outputs, inputs = levels.levels.shape
    repeat = levels.form.group // 32
    heads = [levels.scales]
    if levels.zeros is not None:
        heads.append((levels.scales.float() * -levels.zeros.float()).half())
    scales = torch.stack([head.repeat_interleave(repeat, 1) for head in heads], -1)  # [out, blocks, 1 or 2]
    each = levels.levels.numpy().reshape(outputs, inputs // 32, 32)
    if levels.form.bits == 8:
        body = each ^ 128
    else:
        body = each[..., :16] | each[..., 16:] << 4
    return np.concatenate((scales.contiguous().numpy().view(np.uint8), body), -1).reshape(outputs, -1)


def check(files: Source) -> None:
    """Raise UnsupportedModel for a model that `write` cannot write, saying why."""
    if not isinstance(files.tensors(), GGUFModel):
        _metadata(files)


def write(files: Source, path: Path, form: WeightsForm, levels: Find, changed: Mapping[str, Tensor]) -> None:
    """Write a model into `path`: `levels` finds those of a linear layer's matrix by its name in a checkpoint; tensors
    that have `changed` are taken instead of the model's own."""
    tensors, config = files.tensors(), parse_config(files.settings())
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(tensors, GGUFModel):
        metadata = {key: value for key, value in tensors.meta.values.items() if not key.startswith("split.")}
        metadata.pop("general.alignment", None)
        sources = tensors.sources
        plain = {name: _stored(tensors, name) for name in tensors.stored}
    else:
        metadata, sources = _metadata(files)
        plain = {source.name: _plain(tensors, name, source, config) for name, source in sources.items()}
        if (divisors := _divisors(config, _theta(files.settings()))) is not None:
            plain[FREQUENCIES] = _floats(FREQUENCIES, divisors)
    metadata |= {"general.file_type": FILE_TYPE[block_type(form)], "general.quantization_version": 2}
    taken, every = matrices(config), dict(plain)
    merged: dict[str, list[str]] = {}
    for name, source in sources.items():
        if name in taken:
            merged.setdefault(source.name, []).append(name)  # experts, in their order
        elif name in changed:
            every[source.name] = _floats(source.name, _done(changed[name].float(), source.change, config))
    for own, names in merged.items():
        every[own] = _levelled(own, names, sources, levels, form, taken, config)
    write_gguf(path, metadata, list(every.values()))


# ---- tensors
def _stored(model: GGUFModel, name: str) -> TensorToWrite:
    """A tensor of a GGUF file as it lies there."""
    file, info = model.stored[name]
    return TensorToWrite(name, info.shape, info.type.name, lambda: iter((file.data(info),)))


def _plain(tensors: Tensors, name: str, source: TensorSource, config: ModelConfig) -> TensorToWrite:
    """A tensor of a checkpoint that is not rounded: vectors in float32, matrices in bfloat16."""
    shape = tensors.shape(name)
    kind = "F32" if len(shape) == 1 else "BF16"

    def data() -> Iterator[Bytes]:
        values = _done(tensors.read(name, torch.float32).float(), source.change, config)
        values = values if kind == "F32" else values.bfloat16().view(torch.int16)
        yield values.contiguous().numpy().view(np.uint8)

    return TensorToWrite(source.name, shape, kind, data)


def _floats(name: str, values: Tensor) -> TensorToWrite:
    return TensorToWrite(name, tuple(values.shape), "F32", lambda: iter((values.numpy().view(np.uint8),)))


def _levelled(
    own: str, names: list[str], sources: Mapping[str, TensorSource], levels: Find, form: WeightsForm,
    taken: Mapping[str, tuple[int, int]], config: ModelConfig,
) -> TensorToWrite:  # fmt: skip
    """A matrix in levels, or those of all experts as one tensor."""
    shape: tuple[int, ...] = taken[names[0]]
    if sources[names[0]].entry is not None:
        names, shape = sorted(names, key=lambda name: sources[name].entry or 0), (len(names), *shape)

    def data() -> Iterator[Bytes]:
        for name in names:
            yield blocks_of(levels(name))[_order(shape[-2], sources[name].change, config)]

    return TensorToWrite(own, shape, block_type(form), data)


def _order(rows: int, change: Change, config: ModelConfig) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which row of the matrix is each row in the file: the converter puts those of a rotated pair side by side."""
    heads = {"pairs of queries": config.heads, "pairs of keys": config.kv_heads}.get(change)
    order = np.arange(rows)
    return order if heads is None else order.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _done(values: Tensor, change: Change, config: ModelConfig) -> Tensor:
    """Values float32 as the converter changes them; the inverse of `families.undone`."""
    if change == "raised":
        return values + 1.0
    return values[torch.from_numpy(_order(len(values), change, config))]


# ---- metadata
def _metadata(files: Source) -> tuple[dict[str, Any], dict[str, TensorSource]]:
    """What a file says of a checkpoint, and where it has each tensor. Raises UnsupportedModel for what it cannot say:
    all is read again, and must be the same architecture."""
    raw = files.settings()
    config = parse_config(raw)
    prefix = PREFIX.get(config.family)
    if prefix is None or any(spec is not None for spec in config.moe):
        kind = config.family if prefix is None else f"{config.family} with experts"
        raise UnsupportedModel(f"{files.path}: a .gguf file of a {kind} is written from another .gguf file of it only. "
                               f"Name a folder instead; from checkpoints {', '.join(PREFIX)} are written.")  # fmt: skip
    found = _said(files, config, prefix, _theta(raw))
    shapes: dict[str, tuple[int, ...]] = {way.name: () for way in _candidates(prefix, config.layers)}
    ways = families.ways(GGUFFields(Metadata(found, files.path), prefix, shapes, lambda name: []), config.layers)
    names = [name for parts in layout(config).values() for name, _ in parts]
    sources = {name: ways[name] for name in names if name in ways}
    read = _read_again(files, config, found, sources)
    other = _unlike(config, read) + [name for name in names if name not in sources]
    if other:
        raise UnsupportedModel(f"{files.path}: a .gguf file of its architecture cannot say {', '.join(other[:4])}. "
                               "Name a folder instead of a .gguf file.")  # fmt: skip
    return found, sources


def _said(files: Source, config: ModelConfig, prefix: str, theta: float) -> dict[str, Any]:
    """The metadata of a file of this architecture and its vocabulary."""
    found: dict[str, Any] = {
        "general.architecture": prefix, "general.name": files.path.name, f"{prefix}.block_count": config.layers,
        f"{prefix}.context_length": config.max_positions, f"{prefix}.embedding_length": config.hidden,
        f"{prefix}.feed_forward_length": config.intermediate, f"{prefix}.attention.head_count": config.heads,
        f"{prefix}.attention.head_count_kv": config.kv_heads, f"{prefix}.attention.key_length": config.head_dim,
        f"{prefix}.attention.value_length": config.head_dim,
        f"{prefix}.attention.layer_norm_rms_epsilon": config.eps, f"{prefix}.rope.freq_base": theta,
        f"{prefix}.rope.dimension_count": config.ropes[0].dim if config.ropes else config.head_dim,
        f"{prefix}.vocab_size": config.vocab,
    }  # fmt: skip
    found |= written(files.tokenizer(), files.special(), files.templates(), config.vocab, files.path)
    more = [token for token in config.eos if token != found.get("tokenizer.ggml.eos_token_id")]
    return found | {f"tokenizer.ggml.{name}_token_id": token for name, token in zip(("eot", "eom"), more)}


def _read_again(
    files: Source, config: ModelConfig, found: Mapping[str, Any], sources: Mapping[str, TensorSource]
) -> ModelConfig:
    """The architecture of a file with this metadata and these tensors."""
    divisors = _divisors(config, float(found[f"{found['general.architecture']}.rope.freq_base"]))
    shapes: dict[str, tuple[int, ...]] = {way.name: () for way in sources.values()}
    if divisors is not None:
        shapes[FREQUENCIES] = (len(divisors),)
    as_read = {key: [each.encode() for each in value] if isinstance(value, list) else value
               for key, value in found.items()}  # fmt: skip
    values = [] if divisors is None else divisors.tolist()
    fields = GGUFFields(Metadata(as_read, files.path), found["general.architecture"], shapes, lambda name: values)
    return parse_config(RawConfig(families.settings(fields, config.vocab), files.path))


def _candidates(prefix: str, layers: int) -> Iterator[TensorSource]:
    """Every tensor that a file of the family may have."""
    kind = families.FAMILIES[prefix]
    for name in ("token_embd.weight", "output_norm.weight", "output.weight"):
        yield TensorSource(name)
    tables = (kind.norms, families.HEADS, families.ATTENTION, families.MLP)
    for i in range(layers):
        for own, _ in (pair for table in tables for pair in table):
            for part in ("weight", "bias"):
                yield TensorSource(f"blk.{i}.{own}.{part}")


def _unlike(config: ModelConfig, read: ModelConfig) -> list[str]:
    """The fields in which an architecture differs from what is read of it; float32 rounds some of them."""
    same = replace(read, family=config.family, eos=config.eos, bos=config.bos, eps=config.eps, ropes=config.ropes)
    fields = [name for name in vars(config) if getattr(config, name) != getattr(same, name)]
    close = len(config.ropes) == len(read.ropes) and all(map(_alike, config.ropes, read.ropes))
    fields += [] if close else ["ropes"]
    fields += [] if set(config.eos) <= set(read.eos) else ["eos"]
    return fields if math.isclose(config.eps, read.eps, rel_tol=NEAR) else [*fields, "eps"]


def _alike(one: Rope, other: Rope) -> bool:
    return one.dim == other.dim and math.isclose(one.scale, other.scale, rel_tol=NEAR) and all(
        math.isclose(a, b, rel_tol=NEAR) for a, b in zip(one.inverse, other.inverse))  # fmt: skip


def _theta(raw: RawConfig) -> float:
    rope = raw.mapping("rope_parameters")
    return float(RawConfig(rope, raw.path).number("rope_theta", raw.number("rope_theta", 10_000.0)))


def _divisors(config: ModelConfig, theta: float) -> Tensor | None:
    """By what each frequency is divided, float32 [pairs]; None where they are those of `theta`."""
    if len(config.ropes) != 1:
        return None
    own = torch.tensor(config.ropes[0].inverse, dtype=torch.float64)
    plain = theta ** -(torch.arange(len(own), dtype=torch.float64) / len(own))
    divisors = plain / own
    return None if bool(((divisors - 1).abs() < NEAR).all()) else divisors.float()
