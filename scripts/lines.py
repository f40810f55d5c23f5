"""Lines of Python per file, the change against main (on main: against the commit before), and the budgets of folders.

    python scripts/lines.py [REF]

Exits with 1 if a folder is over its budget: what grew has to move, or to go; a budget is raised only with a reason in
the commit that raises it. Needs nothing but Python and, for the change, git.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "src/phasewise/"
BUDGETS = {  # folders that share a budget ("" = the files at the root of the package; folders below count): its lines
    ("", "verbs", "engine", "step", "request"): 7020,
    ("speculation",): 1210,
    ("kv",): 4050,
    ("cluster",): 4000,
    ("serve",): 7370,
    ("ops",): 2150,
    ("plan",): 3750,
}
LONGEST = 400  # lines of a file of src/: one that is longer has two subjects


def git(*command: str) -> str | None:
    """What git prints, or None when it fails (no repository, no such commit)."""
    done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def now() -> dict[str, int]:
    """{file: lines} of the working tree: what git tracks or would add; without git, everything under src and tests."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    if listed is None:
        paths = sorted(p for top in ("src", "tests", "scripts") for p in (ROOT / top).rglob("*.py"))
    else:
        paths = [ROOT / name for name in sorted(set(listed.splitlines()))]
    return {str(p.relative_to(ROOT)): len(p.read_bytes().splitlines()) for p in paths if p.is_file()}


def before(ref: str) -> dict[str, int] | None:
    """{file: lines} at a commit, or None when it cannot be read. git counts the lines of all files at once."""
    counted = git("grep", "--count", "-e", "", ref, "--", "*.py")
    if counted is None:
        return None
    rows = (line.removeprefix(f"{ref}:").rsplit(":", 1) for line in counted.splitlines())
    return {name: int(lines) for name, lines in rows}


def reference() -> str:
    """The commit to compare with: where this branch left main; on main itself, the commit before."""
    head, base = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "main")
    return "HEAD~1" if base is None or head is None or base == head else base.strip()


def belongs(name: str, folders: tuple[str, ...]) -> bool:
    """Whether a file counts towards the budget of these folders."""
    if not name.startswith(SOURCE):
        return False
    first, _, rest = name.removeprefix(SOURCE).partition("/")
    return (first if rest else "") in folders


def budgets(new: dict[str, int], old: dict[str, int] | None) -> list[str]:
    """One line per budget: how much of it is used, and the change."""
    lines = []
    for folders, budget in BUDGETS.items():
        used, was = (sum(n for f, n in files.items() if belongs(f, folders)) for files in (new, old or {}))
        change = f", {used - was:+}" if old is not None and used != was else ""
        over = f", {used - budget} too many" if used > budget else ""
        lines.append(f"{' + '.join(folder or 'root' for folder in folders)}: {used} of {budget} lines{change}{over}")
    return lines


def excess(new: dict[str, int]) -> list[str]:
    """What is too large: budgets and files."""
    found = [line for line in budgets(new, None) if line.endswith("too many")]
    files = {name: n for name, n in new.items() if name.startswith(SOURCE) and n > LONGEST}
    return found + [f"{name}: {n} lines, at most {LONGEST}" for name, n in files.items()]


def report(new: dict[str, int], old: dict[str, int] | None) -> list[str]:
    """One line per file with its change, folders and their sums, and the budgets."""
    names = sorted({*new, *(old or {})}, key=lambda name: (str(Path(name).parent), name))
    lines: list[str] = []
    folder = ""
    for name in names:
        parent = str(Path(name).parent)
        if parent != folder:
            folder = parent
            inside = [n for n in names if str(Path(n).parent) == folder]
            lines.append(_row(f"{folder}/", inside, new, old))
        lines.append("  " + _row(Path(name).name, [name], new, old, 40))
    lines.append(_row("all", names, new, old))
    return lines + budgets(new, old)


def _row(label: str, names: list[str], new: dict[str, int], old: dict[str, int] | None, width: int = 42) -> str:
    lines = sum(new.get(name, 0) for name in names)
    change = 0 if old is None else lines - sum(old.get(name, 0) for name in names)
    return f"{label:<{width}}{lines:>7}" + (f"  {change:+}" if change else "")


def main(argv: list[str]) -> int:
    ref = argv[0] if argv else reference()
    new, old = now(), before(ref)
    print("\n".join(report(new, old)))
    print(f"changes are against {ref[:12]}" if old is not None else f"no commit {ref[:12]} to compare with")
    wrong = excess(new)
    if wrong:
        print("error: too large: " + "; ".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
