"""Planted faults: small breakages of the source, each of which some test must catch. `scripts/faults.py` plants them.

A file of this folder holds those of one area, which its name gives:

    [[fault]]
    id = "top-p-drops-the-last"
    about = "The token with which the cumulated mass reaches top_p is dropped."
    file = "src/phasewise/ops/sampling.py"
    find = "before = ordered.cumsum(-1) - ordered"      # occurs exactly once in the file
    put = "before = ordered.cumsum(-1)"
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FIELDS = {"id", "about", "file", "find", "put"}
MOVED = (
    "Code that moves takes its faults along: give the new place (`file`), or the text in which the slip would be made "
    "now (`find`, which must occur once, and `put`). If the code that the fault breaks is gone for good, plant the "
    "same slip where that work is done now; delete it only if nothing like it can be written any more."
)


@dataclass(frozen=True)
class Fault:
    """In `file`, `find` is replaced by `put`. `about` says in a sentence what is wrong then."""

    area: str
    id: str
    about: str
    file: str
    find: str
    put: str

    def planted(self, text: str) -> str:
        """The broken file. Raises ValueError where the text to break is not there, or is there more than once."""
        count = text.count(self.find)
        if count != 1:
            raise ValueError(f"{self.area}.toml: {self.id}: its text occurs {count} times in {self.file}. {MOVED}")
        return text.replace(self.find, self.put)


def faults() -> list[Fault]:
    """All of them, area by area."""
    found = []
    for path in sorted(HERE.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            if entry.keys() != FIELDS:
                raise ValueError(f"{path.name}: a fault has the fields {sorted(entry)}, not {sorted(FIELDS)}")
            found.append(Fault(path.stem, **entry))
    return found
