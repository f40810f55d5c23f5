"""Write the generated tables into README.md, between markers; with --check only say whether they are up to date.

python scripts/readme_tables.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from phasewise.cli.methods import markdown

README = Path(__file__).resolve().parent.parent / "README.md"
TABLES = {"methods": markdown}


def filled(text: str, name: str, table: str) -> str:
    """`text` with what lies between the markers of `name` replaced. Raises ValueError if they are not there once."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"README.md must hold {begin} and, after it, {end}, once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def main(argv: list[str]) -> int:
    old = README.read_text(encoding="utf-8")
    new = old
    for name, make in TABLES.items():
        new = filled(new, name, make())
    if "--check" in argv:
        if new != old:
            print("error: README.md's tables are out of date: run make readme", file=sys.stderr)
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
