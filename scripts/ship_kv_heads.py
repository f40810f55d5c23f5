"""What `phasewise convert kv_heads` made of an embedded model, in the form in which it ships: what differs alone.

    python scripts/ship_kv_heads.py MADE FOLDER [BASE]

FOLDER is made beside BASE's own (src/phasewise/pocket/target unless given), and read as a model over that one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from phasewise.known import shelf
from phasewise.known.models import EMBEDDED, Embedded
from phasewise.model import instead
from phasewise.model.directory import Directory


def main(made: str, folder: str, base: str = "") -> None:
    pocket = EMBEDDED["pocket"]
    assert isinstance(pocket, Embedded)
    under = Path(base) if base else shelf.place(pocket)
    heads = Directory(Path(made)).settings().size("num_key_value_heads")
    command = f"phasewise convert kv_heads {pocket.name} --heads {heads} (docs/pocket.md says how long)"
    written = instead.save(under.parent / folder, Directory(under), Directory(Path(made)), command)
    print(f"{under.parent / folder}: {written / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
