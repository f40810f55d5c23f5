"""The house: which room may import which, held against the code, and its picture in docs/architecture.md.

    python scripts/rooms.py [--check]

A room is a folder of src/phasewise; the files at the root are the doors. Imports go down ROOMS only, at module level
and inside functions alike, and make no circle between files. Names needed for annotations alone (under TYPE_CHECKING)
may point up where ANNOTATIONS says so. Needs nothing but Python.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "phasewise"
PAGE = ROOT / "docs" / "architecture.md"
# from the ground up: a room imports from rooms named before it
ROOMS = (
    "errors", "child", "known", "catalog", "ops", "gguf", "model", "request", "kv", "step", "verbs", "speculation",
    "engine", "cluster", "methods", "doors", "train", "bench", "plan", "report", "reproduce", "serve", "check", "cli",
)  # fmt: skip
ALONE = {
    "errors": "errors",
    "version": "errors",
    "child": "child",
    "catalog": "catalog",
    "spelling": "catalog",
    "__main__": "cli",
}  # files at the root
DOORS = ("__init__", "adapters", "llm", "load", "options", "builder", "recipes")
VERBS = ("place", "schedule", "decode", "draft", "verify", "attend", "evict", "store", "skip", "sample")
SHARED = (
    "host",
    "method",
    "slot",
    "traits",
    "conflict",
)  # files of verbs/ that belong to no verb
# upward, for annotations: contracts may be named from below, and what is held or handed over by whoever holds it
ANNOTATIONS = {
    ("step", "verbs"), ("request", "kv"), ("request", "step"), ("verbs", "engine"),
    ("verbs", "cluster"), ("verbs", "speculation"),
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One file importing another, both as dotted names below phasewise; `types`: for annotations alone."""

    file: str
    target: str
    types: bool


def room(module: str) -> str:
    """The room a module is in. Files at the root are doors, but for those that are rooms of their own."""
    first, dot, _ = module.partition(".")
    return first if dot else ALONE.get(first, "doors")


def modules(source: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts)] = path
    return found


def imports(source: Path = SOURCE) -> list[Import]:
    """Every import of one phasewise file by another, wherever in the file it stands."""
    known = modules(source)
    found: list[Import] = []

    def resolve(name: str) -> str | None:
        return next((n for n in (name, f"{name}.__init__" if name else "__init__") if n in known), None)

    def walk(node: ast.AST, file: str, types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            only = types or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            if isinstance(child, ast.ImportFrom) and re.match(r"phasewise(\.|$)", child.module or ""):
                base = (child.module or "").removeprefix("phasewise").removeprefix(".")
                for alias in child.names:
                    target = resolve(f"{base}.{alias.name}" if base else alias.name) or resolve(base)
                    if target is not None and target != file:
                        found.append(Import(file, target, only))
            elif isinstance(child, ast.Import):
                names = [a.name.partition(".")[2] for a in child.names if re.match(r"phasewise(\.|$)", a.name)]
                found.extend(Import(file, t, only) for t in map(resolve, names) if t is not None and t != file)
            walk(child, file, only)

    for name, path in known.items():
        walk(ast.parse(path.read_text(encoding="utf-8")), name, False)
    return found


def faults(source: Path = SOURCE) -> list[str]:
    """What breaks the rules of the house, one sentence each."""
    known, every = modules(source), imports(source)
    found = [f"{m}: {room(m)}/ is not a room: put it into ROOMS" for m in known if room(m) not in ROOMS]
    found += [f"{m}.py is at the root, where only doors are" for m in known if room(m) == "doors" and m not in DOORS]
    rank = {name: i for i, name in enumerate(ROOMS)}
    for i in every:
        a, b = room(i.file), room(i.target)
        if a == b or a not in rank or b not in rank or rank[b] < rank[a]:
            continue
        if not i.types:
            found.append(f"{i.file} imports {i.target}: {b} lies above {a}")
        elif (a, b) not in ANNOTATIONS:
            found.append(f"{i.file} names {i.target} in annotations: {b} lies above {a}")
    used = {(room(i.file), room(i.target)) for i in every if i.types}
    found += [f"nobody in {a}/ names anything of {b}/: take it out of ANNOTATIONS" for a, b in ANNOTATIONS - used]
    found += [f"a circle at run time: {' -> '.join([*ring, ring[0]])}" for ring in circles(every)]
    return found + missing(source)


def missing(source: Path) -> list[str]:
    """Verbs that lack their file, their folder of methods or their folder of tests, and files that are no verb's."""
    found = []
    for verb in VERBS:
        places = (source / "verbs" / f"{verb}.py", source / "methods" / verb, source.parent.parent / "tests" / verb)
        found += [
            f"the verb {verb} has no {path.relative_to(source.parent.parent)}" for path in places if not path.exists()
        ]
    files = {path.stem for path in (source / "verbs").glob("*.py")} - {"__init__", *SHARED, *VERBS}
    return found + [f"verbs/{name}.py is no verb" for name in sorted(files)]


def circles(every: Sequence[Import]) -> list[list[str]]:
    """Groups of files that import each other at run time (Tarjan's strongly connected components)."""
    graph: dict[str, list[str]] = {}
    for i in every:
        if not i.types:
            graph.setdefault(i.file, []).append(i.target)
            graph.setdefault(i.target, [])
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            ring = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(ring) > 1:
                found.append(ring)

    for node in graph:
        if node not in index:
            visit(node)
    return found


def picture(source: Path = SOURCE) -> str:
    """The rooms as a Mermaid graph and a table: arrows that no longer way replaces, dotted ones for annotations."""
    every = [(room(i.file), room(i.target), i.types) for i in imports(source)]
    solid = {(a, b) for a, b, types in every if a != b and not types}
    dotted = {(a, b) for a, b, types in every if types and (a, b) in ANNOTATIONS}
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"  {a} --> {b}" for a, b in sorted(solid) if not _other_way(a, b, solid) and b != "errors"]
    lines += [f"  {a} -.-> {b}" for a, b in sorted(dotted)]
    lines += ["```", "", "| room | what lives there |", "|---|---|"]
    here = {room(module) for module in modules(source)}
    lines += [f"| {_label(name)} | {_about(source, name)} |" for name in reversed(ROOMS) if name in here]
    return "\n".join(lines)


def _other_way(a: str, b: str, arrows: set[tuple[str, str]]) -> bool:
    """Whether b is reached from a through another room."""
    seen, todo = set(), [c for x, c in arrows if x == a and c != b]
    while todo:
        node = todo.pop()
        if node == b:
            return True
        if node not in seen:
            seen.add(node)
            todo += [c for x, c in arrows if x == node]
    return False


def _label(name: str) -> str:
    known = {
        "doors": "`*.py`",
        "errors": "`errors.py`, `version.py`",
        "catalog": "`catalog.py`, `spelling.py`",
        "child": "`child.py`",
    }
    return known.get(name, f"`{name}/`")


def _about(source: Path, name: str) -> str:
    alone = {"doors": "__init__", "errors": "errors", "child": "child", "catalog": "catalog"}
    path = source / f"{alone[name]}.py" if name in alone else source / name / "__init__.py"
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ""
    return " ".join((words or "").split("\n\n")[0].split())


def filled(text: str, table: str) -> str:
    begin, end = "<!-- rooms:begin -->", "<!-- rooms:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{PAGE.name} must hold {begin} and {end}, once each")
    return text.split(begin)[0] + f"{begin}\n{table}\n{end}" + text.split(end)[1]


def main(argv: Sequence[str]) -> int:
    wrong = faults()
    print("\n".join(wrong) or "rooms: imports go one way, without circles")
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old, picture())
    if "--check" not in argv:
        PAGE.write_text(new, encoding="utf-8")
    elif new != old:
        print("docs/architecture.md shows another house: run make rooms", file=sys.stderr)
        return 1
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
