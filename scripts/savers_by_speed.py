"""What savers are worth where memory is read slowly and where it is read fast, from what `phasewise bench savers --csv`
wrote: one machine in several runs, or one whose speed changed meanwhile.

    python scripts/savers_by_speed.py RUN.csv [RUN.csv...] --split GBS [--rest]

Rounds below GBS (GB/s, as they read memory when they began) and others apart. Of each setting, at each batch size: the
median gain over dense of the same round, the median share of the gain that the saved bytes promise at that round's
speed, and of how many rounds. Where bytes bound a setting its share stays, where arithmetic does it falls as memory
gets faster. Settings that run fewer layers than dense are left out: their weights count, too.

--rest shows instead what is left of a step once the time is taken off in which its KV can be read at that speed, over
what is left of dense's: t0 of t0 + bytes / B.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from phasewise.bench import report
from phasewise.bench.savers import DENSE, SettingTurn
from phasewise.bench.worth import LEAST, promised
from phasewise.errors import UserError


class Pair(NamedTuple):
    """A setting's turn against dense's of the same round. `share`: None where no gain is promised."""

    gain: float
    share: float | None
    rest: float

    @staticmethod
    def says(some: Sequence[Pair]) -> str:
        """Gain and share, and of how many rounds."""
        shares = [pair.share for pair in some if pair.share is not None]
        share = f"{statistics.median(shares):.0%}" if shares else "-"
        return f"{statistics.median(pair.gain for pair in some):.2f}, {share} ({len(some)})"

    @staticmethod
    def leaves(some: Sequence[Pair]) -> str:
        """What is left of a step, over dense's, and of how many rounds."""
        return f"{statistics.median(pair.rest for pair in some):.2f} ({len(some)})"


def rest(turn: SettingTurn) -> float:
    """Seconds of a step beside those in which its KV is read."""
    return turn.seconds - turn.read / turn.rate


def turns(path: Path) -> list[SettingTurn]:
    """Raises UserError where the file is of another kind."""
    kinds = {field.name: {"str": str, "int": int}.get(str(field.type), float) for field in fields(SettingTurn)}
    try:
        with path.open(newline="") as file:
            found = [
                SettingTurn(**{name: kind(row[name]) for name, kind in kinds.items()}) for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{path.name}: no turns of `phasewise bench savers --csv` ({error!r})") from error
    if not found:
        raise UserError(f"{path.name}: no turns of `phasewise bench savers --csv` (it is empty)")
    return found


def pairs(run: Iterable[SettingTurn], split: float) -> dict[tuple[str, int, bool], list[Pair]]:
    """By setting, batch and whether memory was read at `split` bytes/s or faster."""
    every = list(run)
    dense = {(turn.batch, turn.group, turn.number): turn for turn in every if turn.setting == DENSE}
    found: dict[tuple[str, int, bool], list[Pair]] = {}
    for turn in every:
        beside = dense[turn.batch, turn.group, turn.number]
        if turn.setting == DENSE or turn.layers != beside.layers:
            continue
        gain, says = beside.seconds / turn.seconds, promised(beside.seconds, beside.read - turn.read, turn.rate)
        share = (gain - 1) / (says - 1) if says is not None and says >= 1 + LEAST else None
        found.setdefault((turn.setting, turn.batch, turn.rate >= split), []).append(
            Pair(gain, share, rest(turn) / rest(beside))
        )
    return found


def table(
    found: dict[tuple[str, int, bool], list[Pair]], cell: Callable[[Sequence[Pair]], str]
) -> tuple[list[str], list[list[str]]]:
    """-> header, rows"""
    columns = sorted({(batch, fast) for _, batch, fast in found})
    header = ["setting", *(f"{batch} at once, {'fast' if fast else 'slow'}" for batch, fast in columns)]
    rows = []
    for setting in dict.fromkeys(name for name, _, _ in found):
        cells = [cell(some) if (some := found.get((setting, *column))) else "-" for column in columns]
        rows.append([f"`{setting}`", *cells])
    return header, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.csv")
    parser.add_argument("--split", type=float, required=True, metavar="GBS", help="GB/s")
    parser.add_argument("--rest", action="store_true", help="what of a step is left beside reading KV, over dense's")
    asked = parser.parse_args()
    found: dict[tuple[str, int, bool], list[Pair]] = {}
    try:
        for path in asked.runs:
            for key, some in pairs(turns(path), asked.split * 1e9).items():
                found.setdefault(key, []).extend(some)
    except UserError as error:
        parser.error(str(error))
    print(report.markdown(*table(found, Pair.leaves if asked.rest else Pair.says)))


if __name__ == "__main__":
    main()
