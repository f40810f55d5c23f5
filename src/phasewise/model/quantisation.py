"""What `quantization_config` of config.json says of a checkpoint that others have quantised, and what can be read.

GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) name their layouts of 4 bits; compressed-tensors is llm-compressor's
form for theirs and others. Which matrices are quantised is told by the tensors, not by the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from phasewise.errors import UnsupportedModel, UserError
from phasewise.model.raw import RawConfig

KEY, MLX = "quantization_config", "quantization"  # MLX writes one of them, or both
LQ = "lq"  # phasewise's own, of which `lq.py` reads the rest
CODEBOOK = "codebook"  # likewise, `codebook.py`
NM = "nm"  # likewise, `nm.py`
GPT_OSS = "mxfp4"  # as gpt-oss has it (joined_experts.py)
PACKED_BYTES = "pack-quantized, 8 bits"
READ = ("gptq (4 bits), awq (4 bits, gemm), fp8, compressed-tensors (pack-quantized of 4 or 8 bits, int-quantized of "
        "8, float-quantized of 8, nvfp4- and mxfp4-pack-quantized), gpt-oss's mxfp4, bitsandbytes (4 bits), MLX's (4 "
        "bits), phasewise's lq, codebook and nm")  # fmt: skip
Group = tuple[int | None, int | None]  # outputs and inputs that share a scale; None: all


class Quantisation(NamedTuple):
    """How the quantised matrices of a checkpoint lie in its files."""

    layout: str  # gptq | awq | fp8, or as quantised.py and quantised_tables.py name it
    groups: tuple[Group, ...]  # each matrix has one of them
    zeros: bool  # whether every matrix must have levels that stand for 0
    less_one: bool = False  # whether those are stored less one


def quantisation(raw: RawConfig) -> Quantisation | None:
    """What the settings say; None if the checkpoint is not quantised. Raises UnsupportedModel for what is not read."""
    said = _said(raw)
    if not said.values:
        return None
    mlx = "quant_method" not in said.values and {"bits", "group_size"} <= said.values.keys()
    method = "mlx" if mlx else str(said.get("quant_method", "unknown"))
    if method not in METHODS:
        raise UnsupportedModel(f"{raw.path}: the checkpoint is quantised ({method}). What can be read: {READ}, and "
                               "unquantised ones in float32, bfloat16 or float16.")  # fmt: skip
    if method == GPT_OSS and raw.get("model_type") != "gpt_oss":
        raise UnsupportedModel(f"{raw.path}: quant_method mxfp4 is read in gpt-oss's own models alone. In all: {READ}.")
    return METHODS[method](said)


def require_unquantised(raw: RawConfig) -> None:
    """Raise UnsupportedModel for settings of a quantised checkpoint, where weights are changed and written again."""
    if said := _said(raw).values:
        method = said.get("quant_method", "unknown")
        raise UnsupportedModel(f"{raw.path}: the checkpoint is quantised ({method}), and its numbers would be rounded "
                               "again. Use an unquantised one in float32, bfloat16 or float16.")  # fmt: skip


def _said(raw: RawConfig) -> RawConfig:
    """The settings of a quantised checkpoint; empty where it is none."""
    key = KEY if raw.mapping(KEY) else MLX
    return RawConfig(raw.mapping(key), f"{raw.path}: {key}")


def _gptq(said: RawConfig) -> Quantisation:
    _require(said, "bits", said.get("bits"), (4,))
    form = said.get("checkpoint_format", "gptq")
    _require(said, "checkpoint_format", form, ("gptq", "gptq_v2"))
    for pattern, other in said.mapping("dynamic").items():
        if not pattern.startswith("-:") and other:
            raise UnsupportedModel(f"{said.path}: dynamic gives {pattern!r} settings of its own, which are not read. "
                                   "Quantise all layers alike.")  # fmt: skip
    return Quantisation("gptq", (_group(said, said.get("group_size", 128)),), True, form == "gptq")


def _awq(said: RawConfig) -> Quantisation:
    _require(said, "bits", said.get("bits", said.get("w_bit")), (4,))
    _require(said, "version", str(said.get("version", "gemm")).lower(), ("gemm",))
    return Quantisation("awq", (_group(said, said.get("group_size", said.get("q_group_size", 128))),), True)


def _fp8(said: RawConfig) -> Quantisation:
    return Quantisation("fp8", (_block(said, said.get("weight_block_size", [128, 128])),), False)


def _compressed(said: RawConfig) -> Quantisation:
    layout = said.get("format")
    kinds = {"pack-quantized": ("int", (4, 8)), "int-quantized": ("int", (8,)), "float-quantized": ("float", (8,)),
             "nvfp4-pack-quantized": ("float", (4,)), "mxfp4-pack-quantized": ("float", (4,))}  # fmt: skip
    _require(said, "format", layout, tuple(kinds))
    found = list(_weights(said))
    kind, bits = kinds[layout]
    for each in found:
        _require(each, "type", each.get("type", "int"), (kind,))
        _require(each, "num_bits", each.get("num_bits"), bits)
        bits = (each.get("num_bits"),)  # of all others too
        if layout != "pack-quantized" or bits == (8,):
            _require(each, "symmetric", each.get("symmetric", True), (True,))
    if kind == "float" and bits == (4,):
        size = 16 if layout.startswith("nvfp4") else 32
        for each in found:
            _require(each, "group_size", each.get("group_size", size), (size,))
        return Quantisation(layout, ((1, size),), False)
    if layout == "pack-quantized" and bits == (8,):
        layout = PACKED_BYTES
    zeros = not any(each.get("symmetric", True) for each in found)
    return Quantisation(layout, tuple(dict.fromkeys(_shared(each) for each in found)), zeros)


def _shared(weights: RawConfig) -> Group:
    """What shares a scale by compressed-tensors' name for it."""
    strategy = weights.get("strategy", "group")
    _require(weights, "strategy", strategy, ("group", "channel", "tensor", "block"))
    if strategy == "group":
        return _group(weights, weights.get("group_size"))
    if strategy == "block":
        return _block(weights, weights.get("block_structure"))
    return (1, None) if strategy == "channel" else (None, None)


def _weights(said: RawConfig) -> Iterator[RawConfig]:
    """How weights are quantised, of each group of layers."""
    groups = said.mapping("config_groups")
    if not groups:
        raise UserError(f"{said.path}: config_groups says nothing of the layers. Download or export it again.")
    for name, group in groups.items():
        where = f"{said.path}: config_groups: {name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise UserError(f"{where} must be an object with weights, got {group!r:.80}.")
        if group.get("format") not in (None, said.get("format")):
            raise UnsupportedModel(f"{where} has the format {group['format']!r:.80}, and all have "
                                   f"{said.get('format')!r:.80}: one for all is read.")  # fmt: skip
        yield RawConfig(group["weights"], where)


def _bitsandbytes(said: RawConfig) -> Quantisation:
    _require(said, "load_in_4bit", said.get("load_in_4bit", said.get("_load_in_4bit", False)), (True,))
    kind = said.get("bnb_4bit_quant_type", "fp4")
    _require(said, "bnb_4bit_quant_type", kind, ("nf4", "fp4"))
    return Quantisation(kind, (), False)  # matrices say their own sizes


def _mlx(said: RawConfig) -> Quantisation:
    _require(said, "bits", said.get("bits"), (4,))
    _require(said, "mode", said.get("mode", "affine"), ("affine",))
    for module, own in said.values.items():
        if isinstance(own, Mapping) and any(own.get(key, said.get(key)) != said.get(key) for key in own):
            raise UnsupportedModel(f"{said.path}: {module} has settings of its own, {dict(own)!s:.80}, which are not "
                                   "read. Quantise all layers alike.")  # fmt: skip
    return Quantisation("mlx", (_group(said, said.get("group_size")),), True)


def _gpt_oss(said: RawConfig) -> Quantisation:
    return Quantisation(GPT_OSS, (), False)  # experts are, and nothing else


def _lq(_: RawConfig) -> Quantisation:
    return Quantisation(LQ, (), False)  # layers say their own kinds


def _codebook(_: RawConfig) -> Quantisation:
    return Quantisation(CODEBOOK, (), False)


def _nm(_: RawConfig) -> Quantisation:
    return Quantisation(NM, (), False)  # matrices are sparse, not quantised


METHODS = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed,
           "bitsandbytes": _bitsandbytes, "mlx": _mlx, GPT_OSS: _gpt_oss, LQ: _lq,
           CODEBOOK: _codebook, NM: _nm}  # fmt: skip


def _require(said: RawConfig, key: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
        read = " or ".join(map(str, known))
        raise UnsupportedModel(f"{said.path}: {key} is {value!r:.80}; {read} is read. In all: {READ}.")


def _group(said: RawConfig, size: Any) -> Group:
    """So many inputs of an output share a scale; -1 is all of them."""
    if not _positive(size) and size != -1:
        raise UserError(f"{said.path}: group_size must be a positive whole number or -1, got {size!r:.80}.")
    return 1, None if size == -1 else size


def _block(said: RawConfig, size: Any) -> Group:
    """So many outputs and inputs share a scale."""
    if not isinstance(size, list) or len(size) != 2 or not all(map(_positive, size)):
        raise UserError(f"{said.path}: a block must be two positive whole numbers, got {size!r:.80}.")
    return size[0], size[1]


def _positive(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0
