"""Lines of Python per file and folder, and the change against main (on main: against the commit before).

    python scripts/lines.py [REF]

It reports and limits nothing. Needs nothing but Python and, for the change, git.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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


def report(new: dict[str, int], old: dict[str, int] | None) -> list[str]:
    """One line per file with its change, and the sums of folders."""
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
    return lines


def _row(label: str, names: list[str], new: dict[str, int], old: dict[str, int] | None, width: int = 42) -> str:
    lines = sum(new.get(name, 0) for name in names)
    change = 0 if old is None else lines - sum(old.get(name, 0) for name in names)
    return f"{label:<{width}}{lines:>7}" + (f"  {change:+}" if change else "")


def main(argv: list[str]) -> int:
    ref = argv[0] if argv else reference()
    new, old = now(), before(ref)
    print("\n".join(report(new, old)))
    print(f"changes are against {ref[:12]}" if old is not None else f"no commit {ref[:12]} to compare with")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
