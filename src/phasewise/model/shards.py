"""Checkpoints written piece by piece: files of at most a size, their index, and config.json last."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from phasewise.model.weights import INDEX, SINGLE

SHARD_BYTES = 1 << 30  # a file's; what is in memory at a time


def write_checkpoint(target: Path, pieces: Iterable[Mapping[str, Tensor]], config: Mapping[str, Any]) -> int:
    """Write tensors that come in pieces, and config.json, into the folder `target`; returns the tensors' bytes.

    A piece stays within one file. Files are named when all are there, so what is cut short is no checkpoint.
    """
    target.mkdir(parents=True, exist_ok=True)
    shards, total = list[list[str]](), 0
    for number, shard in enumerate(_shards(pieces)):
        save_file(shard, str(target / f"part-{number}"), metadata={"format": "pt"})
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        name = SINGLE if len(shards) == 1 else f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (target / f"part-{number}").rename(target / name)
        where.update(dict.fromkeys(names, name))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (target / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")  # last: now it is one
    return total


def _shards(pieces: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for piece in pieces:
        if shard and sum(tensor.nbytes for tensor in (*shard.values(), *piece.values())) > SHARD_BYTES:
            yield shard
            shard = {}
        shard |= {name: tensor.contiguous() for name, tensor in piece.items()}
    yield shard
