"""LoRA adapters as PEFT saves them (arXiv 2106.09685): a folder with adapter_config.json and adapter_model.safetensors.

A matrix W of the base becomes W + scale * B A, with A [r, in], B [out, r] and scale = lora_alpha / r, or lora_alpha /
sqrt(r) with `use_rslora` (arXiv 2312.03732). What is read here stays beside W: `lowrank.Delta` adds it row by row.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.lowrank import LINEARS

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
LARGEST, LARGEST_CONFIG = 8 << 30, 1 << 20  # bytes of the files, each read into memory at once
PREFIX = "base_model.model."  # before every name in PEFT's files
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
PATTERN = re.compile(r"\^?[A-Za-z0-9_.]+\$?")  # of a layer's name: a name, or the end of one
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# settings of PEFT that change what an adapter computes, and the values of each that are as good as absent
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None), "modules_to_save": (None, []), "lora_bias": (False, None), "bias": ("none", None),
    "fan_in_fan_out": (False, None), "layer_replication": (None, []), "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []), "target_parameters": (None, []), "use_qalora": (False, None),
    "use_bdlora": (None, False), "arrow_config": (None,),
    "kasa_config": (None,), "monteclora_config": (None,), "velora_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # others change the base's weights too
}  # fmt: skip
NOT_LINEAR = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The part of adapter_config.json that decides a layer's scale."""

    alpha: float
    rooted: bool  # rank-stabilised: divide by the square root of the rank
    alphas: Mapping[str, float]  # by a layer's name, or the end of one

    def scale(self, module: str, rank: int) -> float:
        alpha = next((own for name, own in self.alphas.items() if _names(name, module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rooted else rank)


@dataclass(frozen=True, slots=True)
class Adapter:
    """What was read of a folder: tensors under the names of `lowrank.shapes` in float32, scale included; the largest
    rank of one of the checkpoint's layers; and a hash of the files."""

    tensors: Mapping[str, Tensor]
    rank: int
    digest: str


def read(folder: Path, config: ModelConfig, most_rank: int) -> Adapter:
    """The adapter in a folder, for a model.

    Where a linear layer of the model is several of the checkpoint's (q, k and v), their A lie one below the other, and
    B is zero wherever an output does not belong to an A. `most_rank`: the largest rank that is taken. Raises UserError
    naming the file and what is wrong, missing or not supported.
    """
    said = _bytes(folder, CONFIG, LARGEST_CONFIG)
    settings, path = _settings(folder / CONFIG, said), folder / WEIGHTS
    stored = _bytes(folder, WEIGHTS, LARGEST)
    pairs = _pairs(path, _tensors(path, stored))
    rank = max(len(pair["A"]) if pair["A"].ndim else 0 for pair in pairs.values())
    found: dict[str, Tensor] = {}
    for key, parts in layout(config).items():
        if _adaptable(key):
            own = [(name.removesuffix(".weight"), shape) for name, shape in parts]
            halves = [_checked(path, *each, pairs.pop(each[0], None), settings, most_rank) for each in own]
            if any(len(a) for a, _ in halves):
                found[f"{key}.a"] = torch.cat([a for a, _ in halves])
                found[f"{key}.b"] = _diagonal([b for _, b in halves])
    if pairs:
        raise UserError(f"{path}: {_misfit(next(iter(pairs)), config)}")
    return Adapter(found, rank, hashlib.blake2b(said + stored, digest_size=16).hexdigest())


# ---- the settings
def _settings(path: Path, said: bytes) -> LoraSettings:
    raw = _object(path, said)
    _check_supported(path, raw)
    alpha = _number(path, "lora_alpha", raw.get("lora_alpha", 8))
    rooted = raw.get("use_rslora", False)
    if not isinstance(rooted, bool):
        raise UserError(f"{path}: use_rslora = {rooted!r} must be true or false")
    return LoraSettings(alpha, rooted, _patterns(path, raw.get("alpha_pattern") or {}))


def _object(path: Path, said: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold a JSON object")
    return raw


def _check_supported(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise UserError for settings that make another adapter than W + scale * B A of linear layers."""
    if raw.get("peft_type", "LORA") != "LORA":
        raise UserError(f"{path}: peft_type is {raw['peft_type']!r}: only LORA adapters can be served")
    for name, neutral in UNSUPPORTED.items():
        if name in raw and not any(raw[name] == each and type(raw[name]) is type(each) for each in neutral):
            fix = "merge the adapter into its base, or train one without it"
            raise UserError(f"{path}: {name} = {raw[name]!r} is not supported: {fix}")
    targets = raw.get("target_modules")
    named = [targets] if isinstance(targets, str) else targets or []
    wrong = next((each for each in NOT_LINEAR if any(each in str(target) for target in named)), None)
    if wrong is not None:
        raise UserError(f"{path}: target_modules names {wrong}: {_only()}")


def _patterns(path: Path, raw: Any) -> dict[str, float]:
    """`alpha_pattern`; of the regular expressions that PEFT takes there, names and ends of names alone: a hostile one
    could take forever."""
    if not isinstance(raw, dict):
        raise UserError(f"{path}: alpha_pattern = {raw!r} must give layers a number each")
    for name in raw:
        if not PATTERN.fullmatch(name):
            raise UserError(f"{path}: alpha_pattern names {name!r}: give a layer's name or its end, as in q_proj or "
                            "layers.0.self_attn.q_proj")  # fmt: skip
    return {name: _number(path, f"alpha_pattern {name}", alpha) for name, alpha in raw.items()}


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{path}: {name} = {value!r} is not a number")
    return float(value)


def _names(pattern: str, module: str) -> bool:
    """True if a pattern names a layer: all of its name with `^`, else the end of it."""
    name = pattern.removeprefix("^").removesuffix("$")
    return module == name or (not pattern.startswith("^") and module.endswith(f".{name}"))


# ---- the tensors
def _bytes(folder: Path, name: str, most: int) -> bytes:
    """A file of the adapter, in memory: one that shrinks while it is mapped would end the process."""
    path = folder / name
    if name == WEIGHTS and not path.is_file() and (folder / PICKLED).is_file():
        raise UserError(f"{folder} has {PICKLED} alone, and nothing is ever unpickled: save it as {WEIGHTS}")
    try:
        if not path.is_file():
            raise UserError(f"{folder} has no {name}: give the folder of a LoRA adapter as PEFT saves it")
        if path.stat().st_size > most:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes, more than it may have ({most:,})")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _tensors(path: Path, stored: bytes) -> dict[str, Tensor]:
    try:
        return load(stored)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}): it may be truncated") from error


def _pairs(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{layer of the checkpoint: its halves A and B}."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        found = TENSOR.fullmatch(name.removeprefix(PREFIX))
        if found is None:
            raise UserError(f"{path}: {name} {_unknown(name)}")
        if tensor.dtype not in DTYPES:
            raise UserError(f"{path}: {name} is {tensor.dtype}: adapters are float32, bfloat16 or float16")
        pairs.setdefault(found["module"], {})[found["half"]] = tensor
    if not pairs:
        raise UserError(f"{path} holds no tensors")
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise UserError(f"{path}: {module} has no lora_{'B' if 'A' in pair else 'A'}: both halves must be there")
    return pairs


def _unknown(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "belongs to DoRA, which is not supported: merge the adapter into its base"
    if "lora_embedding" in name or any(each in name for each in NOT_LINEAR):
        return f"is of the embeddings or the head: {_only()}"
    return f"is no half of a low-rank pair (lora_A, lora_B): {_only()}"


def _only() -> str:
    return "only linear layers of attention and MLP can have low-rank weights. Merge the adapter into its base"


def _checked(
    path: Path, module: str, shape: tuple[int, ...], pair: Mapping[str, Tensor] | None, settings: LoraSettings,
    most: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A [r, in] and the scaled B [out, r] of a layer of `shape` [out, in] in float32; r = 0 without a `pair`. Raises
    UserError where they do not fit it, are of a rank beyond `most`, or are not finite."""
    if pair is None:
        return torch.empty(0, shape[1]), torch.empty(shape[0], 0)
    a, b = pair["A"], pair["B"]
    if a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != shape or a.shape[0] != b.shape[1] or not len(a):
        raise UserError(
            f"{path}: {module} has A {list(a.shape)} and B {list(b.shape)}, but the model's layer is {list(shape)}: "
            f"wanted A [r, {shape[1]}] and B [{shape[0]}, r]. Is it another base's?"
        )
    if len(a) > most:
        raise UserError(f"{path}: {module} has rank {len(a)}, and the most is {most}: raise --max-lora-rank")
    scaled = b.float() * settings.scale(module, len(a))
    for half, tensor in (("A", a), ("B", scaled)):
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path}: lora_{half} of {module} has values that are not finite: the file is damaged")
    return a.float(), scaled


def _diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """The blocks one below the other and each right of the one before; zero elsewhere."""
    whole = torch.zeros(sum(len(each) for each in blocks), sum(each.shape[1] for each in blocks))
    row = column = 0
    for each in blocks:
        whole[row : row + len(each), column : column + each.shape[1]] = each
        row, column = row + len(each), column + each.shape[1]
    return whole


def _adaptable(key: str) -> bool:
    """True for `<layer>.<linear>` of the decoder; linear layers of experts are none of these."""
    return key.count(".") == 1 and key.partition(".")[2] in LINEARS


def _misfit(module: str, config: ModelConfig) -> str:
    """Why no linear layer of the model is called so."""
    if any(each in module for each in NOT_LINEAR):
        return f"{module} is of the embeddings or the head: {_only()}"
    if "experts" in module or (any(config.moe) and ".mlp." in module):
        return f"{module} is of a mixture of experts: only attention can have low-rank weights there"
    return f"the model has no layer {module}: it has {config.layers}, such as {next(_some(config))}. {_only()}"


def _some(config: ModelConfig) -> Iterator[str]:
    for key, parts in layout(config).items():
        if _adaptable(key):
            yield parts[0][0].removesuffix(".weight")
