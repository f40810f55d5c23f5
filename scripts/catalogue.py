"""Write the table of all methods into docs/catalogue.md, between markers; with --check only say whether it is current.

python scripts/catalogue.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from phasewise.cli.methods import markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "catalogue.md"
BEGIN, END = "<!-- methods:begin -->", "<!-- methods:end -->"


def filled(text: str, table: str) -> str:
    """`text` with the part between the markers replaced. Raises ValueError unless each marker stands there once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{PAGE.name} must hold {BEGIN} and, after it, {END}, once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main(argv: list[str]) -> int:
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old, markdown())
    if "--check" in argv:
        if new != old:
            print("error: docs/catalogue.md is out of date: run make readme", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
