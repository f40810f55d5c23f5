"""What `quantization_config` of config.json says of a checkpoint that others have quantised, and what can be read.

GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) name their layouts of 4 bits; compressed-tensors is llm-compressor's
form for theirs and others. Which matrices are quantised is told by the tensors, not by the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from phasewise.errors import UnsupportedModel, UserError
from phasewise.model.raw import RawConfig

KEY = "quantization_config"
READ = "gptq (4 bits), awq (4 bits, gemm), compressed-tensors (pack-quantized of 4 bits, int-quantized of 8)"


class Quantisation(NamedTuple):
    """How the quantised matrices of a checkpoint lie in its files."""

    layout: str  # gptq | awq | pack-quantized | int-quantized
    groups: tuple[int | None, ...]  # inputs that share a scale, any of them; None: all of an output
    zeros: bool  # whether every matrix must have levels that stand for 0
    less_one: bool = False  # whether those are stored less one


def quantisation(raw: RawConfig) -> Quantisation | None:
    """What the settings say; None if the checkpoint is not quantised. Raises UnsupportedModel for what is not read."""
    said = RawConfig(raw.mapping(KEY), f"{raw.path}: {KEY}")
    if not said.values:
        return None
    method = str(said.get("quant_method", "unknown"))
    if method not in METHODS:
        raise UnsupportedModel(f"{raw.path}: the checkpoint is quantised ({method}). What can be read: {READ}, and "
                               "unquantised ones in float32, bfloat16 or float16.")  # fmt: skip
    return METHODS[method](said)


def require_unquantised(raw: RawConfig) -> None:
    """Raise UnsupportedModel for settings of a quantised checkpoint, where weights are changed and written again."""
    if raw.mapping(KEY):
        method = raw.mapping(KEY).get("quant_method", "unknown")
        raise UnsupportedModel(f"{raw.path}: the checkpoint is quantised ({method}), and its numbers would be rounded "
                               "again. Use an unquantised one in float32, bfloat16 or float16.")  # fmt: skip


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


def _compressed(said: RawConfig) -> Quantisation:
    layout = said.get("format")
    bits = {"pack-quantized": 4, "int-quantized": 8}
    _require(said, "format", layout, tuple(bits))
    found = list(_weights(said))
    for each in found:
        _require(each, "type", each.get("type", "int"), ("int",))
        _require(each, "num_bits", each.get("num_bits"), (bits[layout],))
    groups = (None if each.get("strategy") == "channel" else _group(each, each.get("group_size")) for each in found)
    zeros = not any(each.get("symmetric", True) for each in found)
    if layout == "int-quantized":
        for each in found:
            _require(each, "symmetric", each.get("symmetric", True), (True,))
    return Quantisation(layout, tuple(dict.fromkeys(groups)), zeros)


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
        weights = RawConfig(group["weights"], where)
        _require(weights, "strategy", weights.get("strategy", "group"), ("group", "channel"))
        yield weights


METHODS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}


def _require(said: RawConfig, key: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
        read = " or ".join(map(str, known))
        raise UnsupportedModel(f"{said.path}: {key} is {value!r:.80}; {read} is read. In all: {READ}.")


def _group(said: RawConfig, size: Any) -> int | None:
    """How many inputs share a scale; -1 is all of them."""
    if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
        raise UserError(f"{said.path}: group_size must be a positive whole number or -1, got {size!r:.80}.")
    return None if size == -1 else size
