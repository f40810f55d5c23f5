"""The syntax trees of the repository's own files, for tests that hold its shape."""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

Nodes = Mapping[type[ast.AST], list[ast.AST]]  # in the order of `ast.walk`


@cache
def parsed(root: Path) -> list[tuple[str, Nodes]]:
    """(path, its nodes by their type) of every Python file below src and scripts of a tree, read once."""
    enabled = gc.isenabled()
    gc.disable()  # none of millions of nodes is garbage, and looking for it takes longer than reading them
    try:
        paths = [path for folder in ("src", "scripts") for path in sorted((root / folder).rglob("*.py"))]
        return [(str(path.relative_to(root)), _nodes(path)) for path in paths]
    finally:
        if enabled:
            gc.enable()


def _nodes(path: Path) -> Nodes:
    found: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        found[type(node)].append(node)
    return found
