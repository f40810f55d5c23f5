"""The shape of the code in figures, now and at an earlier commit, as a markdown table for docs/architecture.md.

    python scripts/structure.py REF

Needs nothing but Python and git. Every figure is read from the sources: nothing of the package is imported.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/phasewise/"
CORE = ("engine", "step", "kv", "verbs", "speculation", "request")
HEADLESS = re.compile(r"(What|Whether|How|Of|Where|Who|Whose|By|As|That|So|In which)\b")
Tree = dict[str, str]  # path: text


def now() -> Tree:
    """What git tracks or would add, as it lies in the working tree."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    paths = [path for path in listed if wanted(path) and (ROOT / path).is_file()]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}


def at(ref: str) -> Tree:
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", ref], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        found = {member.name: files.extractfile(member) for member in files if wanted(member.name)}
        return {name: file.read().decode("utf-8") for name, file in found.items() if file is not None}


def wanted(path: str) -> bool:
    return path.endswith((".py", ".md", ".cpp", ".h")) and path.startswith(("src/", "tests/", "docs/", "README"))


def room(path: str) -> str:
    inside = path.removeprefix(PACKAGE)
    return inside.partition("/")[0] if "/" in inside else "*.py"


def python(tree: Tree, below: str) -> Iterator[tuple[str, ast.Module]]:
    for path, text in sorted(tree.items()):
        if path.startswith(below) and path.endswith(".py"):
            yield path, ast.parse(text)


def lookups(tree: Tree) -> int:
    """`getattr` and `hasattr` in the core."""
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        for path, module in python(tree, PACKAGE)
        if room(path) in CORE
        for node in ast.walk(module)
    )


def optional(tree: Tree) -> int:
    """Members that a method may have and that no class declares: a docstring of a verb lists them under *Optional*."""
    line = re.compile(r"^ {4,}(\w+)(?:\([^)]*\) -> .+?|: .+?)  -- \S", re.MULTILINE)
    total = 0
    for _, module in python(tree, PACKAGE + "verbs/"):
        for node in ast.walk(module):
            text = ast.get_docstring(node, clean=False) if isinstance(node, ast.ClassDef) else None
            total += len(line.findall(text.partition("Optional:\n")[2])) if text else 0
    return total


def words(tree: Tree) -> int:
    """Rows of the glossary in docs/architecture.md."""
    after = tree["docs/architecture.md"].partition("## Words")[2].partition("\n## ")[0]
    return max(0, len(re.findall(r"^\|", after, re.MULTILINE)) - 2)


def hand_counted(tree: Tree) -> int:
    """Integers passed to kernels by hand: arrays of words, addresses of their buffers."""
    text = "".join(t for path, t in tree.items() if path.startswith(PACKAGE) and path.endswith(".py"))
    return len(re.findall(r"buffer_info\(\)|frombytes\(|struct\.pack", text))


def branchy(tree: Tree) -> list[str]:
    """`file: function` of each with more than 12 branches, those of comprehensions and of `and` and `or` included."""
    kinds = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.BoolOp, ast.comprehension)
    return [
        f"{path.removeprefix(PACKAGE)}: {node.name}"
        for path, module in python(tree, PACKAGE)
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and sum(isinstance(each, kinds) for each in ast.walk(node)) > 12
    ]


def figures(tree: Tree) -> dict[str, str]:
    classes: Counter[str] = Counter()
    docs = headless = cases = 0
    arrows = set()
    for path, module in python(tree, PACKAGE):
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name] += 1
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                docs += 1
                headless += HEADLESS.match(text) is not None
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("phasewise."):
                arrows.add((room(path), str(node.module).split(".")[1]))
    for _, module in python(tree, "tests/"):
        cases += sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.walk(module))
    readme = tree["README.md"].splitlines()
    return {
        "optional members of methods that docstrings alone declare": str(optional(tree)),
        "`getattr` and `hasattr` in the core": str(lookups(tree)),
        "public classes": str(len(classes)),
        "names of public classes that are used more than once": str(sum(count > 1 for count in classes.values())),
        "words in the glossary": str(words(tree)),
        "addresses and words passed to kernels by hand": str(hand_counted(tree)),
        "docstrings that open without a subject": f"{100 * headless / max(docs, 1):.0f} %",
        "functions with more than 12 branches": str(len(branchy(tree))),
        "pairs of rooms that import one another": str(len({(a, b) for a, b in arrows if a != b})),
        "test functions": f"{cases:,}",
        "lines of the README, and the longest": f"{len(readme)}, {max(map(len, readme))}",
    }


def lines(tree: Tree) -> Counter[str]:
    """Lines of Python by room."""
    found: Counter[str] = Counter()
    for path, text in tree.items():
        if path.startswith(PACKAGE) and path.endswith(".py"):
            found[room(path)] += len(text.splitlines())
    return found


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    before, after = at(argv[0]), now()
    was, are = figures(before), figures(after)
    print("| | before | now |\n|---|---:|---:|")
    for name, value in are.items():
        print(f"| {name} | {was[name]} | {value} |")
    print("\n| lines of Python in | before | now |\n|---|---:|---:|")
    old, new = lines(before), lines(after)
    for name in sorted(old | new):
        print(f"| `{name}{'' if '.' in name else '/'}` | {old[name]:,} | {new[name]:,} |")
    print(f"| all | {sum(old.values()):,} | {sum(new.values()):,} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
