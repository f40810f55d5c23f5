"""Rules that the code does not keep everywhere yet. `ratchets.toml` lists today's exceptions; it may only shrink."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

from phasewise.kv.format import BlockFormat, RowFormat
from phasewise.verbs.attend import Attend
from phasewise.verbs.decode import Decode
from phasewise.verbs.draft import Drafter
from phasewise.verbs.evict import Evict
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placing
from phasewise.verbs.sample import Sample
from phasewise.verbs.schedule import Scheduler
from phasewise.verbs.skip import Skip
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Verifier
from tests.sources import parsed

T = TypeVar("T", bound=ast.AST)
ROOT = Path(__file__).parents[1]
PACKAGE = "src/phasewise/"
EXCEPTIONS = tomllib.loads((Path(__file__).parent / "ratchets.toml").read_text(encoding="utf-8"))
ROOMS = ("engine", "step", "verbs", "speculation", "kv", "request", "cluster", "plan")  # they ask methods for members
ASKED = (
    Method,
    Attend,
    RowFormat,
    Decode,
    Drafter,
    Evict,
    BlockFormat,
    Placing,
    Sample,
    Scheduler,
    Skip,
    Storing,
    Verifier,
)


def each(root: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """(path inside the package, node) of each node of this type in its files."""
    for path, nodes in parsed(root):
        if path.startswith(PACKAGE):
            yield from ((path.removeprefix(PACKAGE), node) for node in nodes[kind] if isinstance(node, kind))


def repeated_classes(root: Path) -> set[str]:
    """Names of public classes that are defined more than once."""
    names = Counter(node.name for _, node in each(root, ast.ClassDef))
    return {name for name, count in names.items() if count > 1 and not name.startswith("_")}


def private_imports(root: Path) -> set[str]:
    """`file: name` of each name with a leading underscore that is imported from another file."""
    return {
        f"{path}: {alias.name}"
        for path, node in each(root, ast.ImportFrom)
        if (node.module or "").startswith("phasewise")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    }


def members_asked_by_name(root: Path) -> set[str]:
    """`file: name` of each member of a verb's class, or trait, that is looked up by `getattr` or `hasattr`."""
    members = {
        name for cls in ASKED for base in cls.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", ()))
    }
    members = {name for name in members if not name.startswith("_")} | {field.name for field in fields(Traits)}
    return {f"{path}: {name}" for path, name in asked_by_name(root) if name in members}


def asked_by_name(root: Path) -> Iterator[tuple[str, str]]:
    """(file, literal name) of each `getattr` and `hasattr` in the rooms that ask methods."""
    for path, node in each(root, ast.Call):
        asks = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        if asks and path.partition("/")[0] in ROOMS:
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield path, str(name.value)


def others_asked_by_name(root: Path) -> set[str]:
    """The same for everything else: what a system may lack, and what docstrings of attend, evict and skip list."""
    return {f"{path}: {name}" for path, name in asked_by_name(root)} - members_asked_by_name(root)


@cache
def structure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("structure", ROOT / "scripts" / "structure.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def branchy(root: Path) -> set[str]:
    """`file: function` of each that has more than 12 branches, as scripts/structure.py counts them."""
    files = (root / PACKAGE).rglob("*.py")
    return set(structure().branchy({str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in files}))


def tangled(root: Path) -> set[str]:
    """Files with a function of a cyclomatic complexity above 12, or of more than six returns."""
    limits = ["--select", "C901,PLR0911", "--config", "lint.mccabe.max-complexity=12",
              "--config", "lint.pylint.max-returns=6"]  # fmt: skip
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--output-format", "json", *limits]
    found = subprocess.run([*command, "src", "scripts", "tests"], cwd=root, capture_output=True, text=True, check=False)
    return {str(Path(each["filename"]).relative_to(root)) for each in json.loads(found.stdout)}


RULES: dict[str, Callable[[Path], set[str]]] = {
    "branchy": branchy,
    "repeated_classes": repeated_classes,
    "private_imports": private_imports,
    "members_asked_by_name": members_asked_by_name,
    "others_asked_by_name": others_asked_by_name,
}


@pytest.mark.parametrize("rule", RULES)
def test_exceptions_only_shrink(rule: str) -> None:
    found, listed = RULES[rule](ROOT), set(EXCEPTIONS[rule])
    assert not found - listed, f"new exceptions of {rule}: {sorted(found - listed)}"
    assert not listed - found, f"no longer exceptions of {rule}, take them out: {sorted(listed - found)}"


def test_only_listed_files_are_tangled() -> None:
    """The list is ruff's own, in pyproject.toml; an entry that is not needed any more fails here."""
    pytest.importorskip("ruff")
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    assert tangled(ROOT) == set(ruff["per-file-ignores"])


def test_each_rule_finds_what_breaks_it(tmp_path: Path) -> None:
    package = tmp_path / "src" / "phasewise" / "kv"
    package.mkdir(parents=True)
    (package / "a.py").write_text("class Twice: ...\nfrom phasewise.kv.b import _own\nhasattr(x, 'beside_it')\n")
    (package / "b.py").write_text("class Twice: ...\nclass Once: ...\ngetattr(x, 'drawer', None)\n")
    assert repeated_classes(tmp_path) == {"Twice"} and private_imports(tmp_path) == {"kv/a.py: _own"}
    assert members_asked_by_name(tmp_path) == {"kv/b.py: drawer"}
    assert others_asked_by_name(tmp_path) == {"kv/a.py: beside_it"}
    body = "".join(f"    if x == {i} or y: pass\n" for i in range(6))
    (package / "c.py").write_text(f"def few(x, y):\n{body}\n\ndef many(x, y):\n{body}    return x if y else y\n")
    assert branchy(tmp_path) == {"kv/c.py: many"}
