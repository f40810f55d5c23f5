"""What CONTRIBUTING says of the code's shape, held against the code: sizes, environment, names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from phasewise import catalog
from phasewise.verbs.method import Method
from tests.sources import parsed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "phasewise"
LONGEST = 60  # lines of a function
OUTSIDE = ("methods", "cli", "serve", "bench", "train", "reproduce", "pocket")  # all else is the core
HEADS = ("speculation", "heads")  # but for this folder: a file for each kind that some method and the trainer share


def core(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] not in OUTSIDE and parts[:2] != HEADS:
            yield path


# ---- sizes
def too_large(root: Path) -> list[str]:
    """Functions that are too long."""
    found = []
    for path, nodes in parsed(root):
        for node in (*nodes[ast.FunctionDef], *nodes[ast.AsyncFunctionDef]):
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            where = f"{path}:{node.lineno} {node.name}"
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LONGEST:
                found.append(f"{where}: {lines} lines")
    return found


def test_functions_are_short() -> None:
    assert not too_large(ROOT)


def test_long_functions_are_found(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    long = "def {}():\n" + "    x = 1\n" * 59
    (tmp_path / "scripts" / "long.py").write_text(long.format("fits") + long.format("does_not") + "    x = 2\n")
    found = too_large(tmp_path)
    assert found == ["scripts/long.py:61 does_not: 61 lines"]


# ---- environment and globals
ENVIRONMENT = {
    "scripts/faults.py": "tests of a broken copy find the copy's modules",
    "src/phasewise/ops/native/__init__.py": "PHASEWISE_KERNELS: which kernels a process loads, before any constructor",
    "src/phasewise/known/shelf.py": "XDG_CACHE_HOME: where caches lie, for this program as for others",
    "src/phasewise/known/wheels.py": "hands the environment on to pip",
    "src/phasewise/child.py": "hands the environment on to a child process",
    "src/phasewise/cluster/ray_backend.py": "Ray's own variables, which Ray's users know",
    "scripts/checkout_pairs.py": "PYTHONPATH: which checkout each of its processes imports",
    "scripts/golden.py": "PHASEWISE_KERNELS: which kernels each of its processes takes",
    "scripts/kernel_pairs.py": "PHASEWISE_KERNELS: which kernels each of its processes takes",
    "scripts/peers.py": "PEER_TOOLS: from a parent to the processes that other people's code starts for it",
}
GLOBALS = {"src/phasewise/ops/native/room.py": "the block that packed weights share: a process has its memory once"}


def environment(root: Path) -> set[str]:
    """Files that look at the environment."""
    return {
        path
        for path, nodes in parsed(root)
        for node in (*nodes[ast.Attribute], *nodes[ast.alias])
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"))
        or (isinstance(node, ast.alias) and node.name in ("environ", "environb", "getenv"))
    }


def rebound(root: Path) -> set[str]:
    """Files with a `global` statement."""
    return {path for path, nodes in parsed(root) if nodes[ast.Global]}


def test_the_environment_switches_nothing_else() -> None:
    assert environment(ROOT) == set(ENVIRONMENT)


def test_nothing_else_is_global() -> None:
    assert rebound(ROOT) == set(GLOBALS)


def test_switches_and_globals_are_found(tmp_path: Path) -> None:
    for name, text in {
        "a": "import os\nx = os.environ['A']\n", "b": "from os import getenv\n", "c": "environ = {}\n",
        "d": "x = 0\ndef f():\n    global x\n    x = 1\n",
    }.items():  # fmt: skip
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "src" / f"{name}.py").write_text(text)
    assert environment(tmp_path) == {"src/a.py", "src/b.py"} and rebound(tmp_path) == {"src/d.py"}


# ---- names of methods
ORDINARY = {
    "all", "none",  # words
    "dense", "match", "slab", "standard",  # models, regular expressions, memory and libraries are such as well
    "int8", "slo", "transfer", "power",  # types of weights, targets of requests, what carries KV, of two and in watts
    "judge",  # of answers, too
}  # fmt: skip


def unmistakable() -> set[str]:
    """Names of methods that mean a method wherever they stand. A new one that is an ordinary word joins the list."""
    return {name for _, name, _ in catalog.every()} - ORDINARY


def without(source: str, *, assigned: tuple[str, ...] = (), docstrings: bool = False) -> str:
    """Source with the lines of some assignments, or of docstrings, left out."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        names = [getattr(t, "id", "") for t in node.targets] if isinstance(node, ast.Assign) else []
        text = docstrings and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or any(name in assigned for name in names):
            assert isinstance(node, ast.stmt)
            for i in range(node.lineno - 1, node.end_lineno or 0):
                lines[i] = ""
    return "\n".join(lines)


def named(source: str, names: set[str]) -> list[str]:
    """Lines with one of these names as a word, comments included; `semi_pd` is also semi-PD and `layered` Layered."""
    words = re.compile(r"\b(" + "|".join(name.replace("_", "[ _-]?") for name in sorted(names)) + r")\b", re.IGNORECASE)
    if not re.search(words.pattern, source.lower()):  # far quicker than to ignore case
        return []
    return [f"{i}: {line.strip()}" for i, line in enumerate(source.splitlines(), 1) if words.search(line)]


def read(path: Path) -> str:
    """What may not name a method: all of a core file but the places that are there for users' sake, and what tensors
    are called in others' files."""
    source = path.read_text(encoding="utf-8")
    if path.name == "options.py":
        return without(source, assigned=("DEFAULTS", "WITH_DRAFT"))  # what is taken when nothing is said
    if path.name == "llm.py":
        return without(source, docstrings=True)  # shows how a method is asked for
    if path.name == "modules.py":
        return without(source, assigned=("NAMED", "NUMBER"))  # a method is called after such a module
    return source


def test_the_core_names_no_method() -> None:
    found = {str(path.relative_to(PACKAGE)): named(read(path), unmistakable()) for path in core(PACKAGE)}
    assert len(found) > 60
    assert not {path: lines for path, lines in found.items() if lines}


def test_a_name_would_be_found() -> None:
    assert {"sarathi", "semi_pd", "prompt_lookup", "layered", "cachegen"} <= unmistakable()
    assert named("x = 1\ny = 'sarathi'  \n# semi-PD\n# Layered prefill\nplayered = 1\n", unmistakable()) == [
        "2: y = 'sarathi'", "3: # semi-PD", "4: # Layered prefill",
    ]  # fmt: skip
    assert named(without("A = 'sarathi'\nB = 'sarathi'\n", assigned=("A",)), unmistakable()) == ["2: B = 'sarathi'"]


# ---- what methods say of themselves
def test_every_method_says_what_it_promises() -> None:
    for verb, name, method in catalog.every():
        assert issubclass(method, Method), f"{verb}.{name} is no Method"
        for field in ("paper", "guarantee", "needs", "neutral"):
            assert hasattr(method, field), f"{verb}.{name} lacks {field}"
