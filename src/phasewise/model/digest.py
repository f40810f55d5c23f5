"""The digest of a model's weights, for what outlives the process: unlike a fingerprint it changes with every number."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from phasewise.model.source import Source

KNOWN = 64  # models that a file of known digests holds


def weights_digest(files: Source, known: Path | None = None) -> str:
    """32 hexadecimal digits of the names, dtypes, shapes and numbers of all tensors.

    Reading them takes about a second for each GB. `known`: a file in which digests are kept, by the paths, sizes and
    times of a model's files, so that this happens once.
    """
    where = hashlib.blake2b(repr((str(files.path.resolve()), files.stamp())).encode(), digest_size=16).hexdigest()
    before = _read(known)
    if where in before:
        return before[where]
    found = _digest(files)
    if known is not None:
        part = known.with_name(f"{known.name}.part")
        with contextlib.suppress(OSError):  # it is computed again next time
            part.write_text(json.dumps(dict([*before.items(), (where, found)][-KNOWN:])), encoding="utf-8")
            part.replace(known)
    return found


def _read(known: Path | None) -> dict[str, str]:
    """Digests by where they come from; none from a file that is not one of ours."""
    try:
        found: Any = {} if known is None else json.loads(known.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    plain = isinstance(found, dict) and all(isinstance(digest, str) for digest in found.values())
    return dict(found) if plain else {}


def _digest(files: Source) -> str:
    tensors, digest = files.tensors(), hashlib.blake2b(digest_size=16)
    for name in sorted(tensors.where):
        tensor = tensors.read(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        tensors.let_go(tensor)
    return digest.hexdigest()
