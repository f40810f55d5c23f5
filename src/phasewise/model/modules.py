"""Modules that a checkpoint carries beside its decoder: layers trained to foretell more tokens.

The decoder does without them, so their tensors are not left over. Who drafts with one reads it from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Qwen3-Next's names, MiMo's, and DeepSeek-V3's: a layer behind the last, which is known by its projection
NAMED = re.compile(r"mtp\.|model\.mtp_layers\.\d+\.")
PROJECTION = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
NUMBER = re.compile(r"(?:^mtp\.layers|^model\.mtp_layers|^model\.layers)\.(\d+)\.")


def module_tensors(names: Iterable[str]) -> list[str]:
    """The names among these that belong to such modules, sorted."""
    listed = sorted(names)
    behind = tuple(found[1] for name in listed if (found := PROJECTION.fullmatch(name)))
    return [name for name in listed if NAMED.match(name) or name.startswith(behind)]


def module_count(names: Iterable[str]) -> int:
    """How many modules these tensors are of."""
    return len({found[1] for name in module_tensors(names) if (found := NUMBER.match(name))})
