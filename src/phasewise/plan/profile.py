"""Profiles of this machine: step times, measured, fitted, and held against sizes that no fit has seen; kept as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phasewise.errors import UserError, near
from phasewise.plan.beside import Beside
from phasewise.plan.fit import PATHS, Fitted, FittedLine, Timed, errors, fit, path_of
from phasewise.plan.fit import Path as Kind
from phasewise.plan.profiler import Size, StepProfiler, halfway, medians, sizes, spared
from phasewise.plan.serving import Serving
from phasewise.plan.shape import DecoderShape
from phasewise.version import __version__

VERSION = 1  # of the file
DOUBT = 0.1  # a median error on held-out steps above this is said


@dataclass(frozen=True)
class Grid:
    """Sizes of steps to measure, each `rounds` times. Half of the sizes between them are held out."""

    prefills: Sequence[int] = (1, 16, 64, 128, 256, 512)
    decodes: Sequence[int] = (1, 2, 4, 8, 16, 32)
    contexts: Sequence[int] = (0, 256, 1024)
    rounds: int = 3

    @property
    def runs(self) -> int:
        """About how many runs of a size there are in all."""
        return self.rounds * (len(self.seen()) + len(self.held_out()))

    def seen(self) -> list[Size]:
        return sizes(self.prefills, self.decodes, self.contexts)

    def held_out(self) -> list[Size]:
        return sizes(halfway(self.prefills), halfway(self.decodes), halfway(self.contexts))


QUICK = Grid((16, 64, 256), (1, 4, 16), (0, 512), 1)


@dataclass(frozen=True)
class HeldOutError:
    """The error of a path's fit at sizes that it has not seen."""

    steps: int
    median: float
    p90: float

    @classmethod
    def of(cls, off: Sequence[float]) -> HeldOutError:
        ordered = sorted(off)
        return cls(len(off), statistics.median(off), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))])


@dataclass(frozen=True)
class Measured:
    """One recipe's steps with so many threads."""

    recipe: str
    threads: int
    methods: Mapping[str, str]
    lines: Mapping[Kind, FittedLine]
    held_out: Mapping[Kind, HeldOutError]
    row_bytes: int  # KV of a token
    beside: Beside = field(default_factory=dict)  # of a busy with as many threads
    shared: Beside = field(default_factory=dict)  # one of the two has all cores, the other a single one of them

    @property
    def cost(self) -> Fitted:
        return Fitted(self.lines)


@dataclass(frozen=True)
class Profile:
    """All that was measured of a model on a machine."""

    machine: Mapping[str, Any]
    model: Mapping[str, Any]  # name, hash, dtype
    shape: DecoderShape
    limits: Mapping[str, float]
    measured: Sequence[Measured]
    served: Mapping[str, Serving] = field(default_factory=dict)  # by "engine" and "workers"
    phasewise: str = __version__

    def of(self, recipe: str = "", threads: int | None = None) -> Measured:
        """Returns a recipe's measurements with so many threads (None: as many as there were). Raises UserError."""
        there = [one for one in self.measured if one.recipe == recipe]
        if not there:
            known = [one.recipe or "default" for one in self.measured]
            raise UserError(f"the profile does not know the recipe {recipe or 'default'!r}. {near(recipe, known)}")
        if threads is None:
            return max(there, key=lambda one: one.threads)
        found = [one for one in there if one.threads == threads]
        if not found:
            have = ", ".join(str(one.threads) for one in there)
            raise UserError(f"the profile was taken with {have} threads, and a worker would have {threads}: measure "
                            f"again with `phasewise profile --threads {have.replace(' ', '')},{threads}`")  # fmt: skip
        return found[0]

    def check(self, cpu: str, hash: str | None) -> list[str]:
        """Returns a sentence for each mismatch with this machine or this model."""
        found = []
        if self.machine.get("cpu") != cpu:
            found.append(f"the profile was taken on {self.machine.get('cpu')!r}, and this machine is {cpu!r}")
        if hash is not None and self.model.get("hash") != hash:
            found.append(f"the profile is of a model with other weights ({self.model.get('name')!r})")
        return found

    def save(self, path: Path) -> None:
        plain = asdict(self) | {"version": VERSION}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Raises UserError for a file that is none, or of another version."""
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"the profile {str(path)!r} cannot be read: {error.strerror}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"the profile {str(path)!r} is not JSON: make one with `phasewise profile`") from error
        if not isinstance(plain, dict) or plain.get("version") != VERSION:
            raise UserError(f"{str(path)!r} is no profile of version {VERSION}: make one with `phasewise profile`")
        try:
            measured = [_measured(one) for one in plain["measured"]]
            shape = DecoderShape(**plain["shape"])
            known = {name: plain[name] for name in ("machine", "model", "limits", "phasewise")}
            served = {name: Serving(**one) for name, one in plain.get("served", {}).items()}
            return cls(shape=shape, measured=measured, served=served, **known)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the profile {str(path)!r} is damaged ({error}): make it again") from error


def _measured(plain: Mapping[str, Any]) -> Measured:
    lines: dict[Kind, FittedLine] = {
        kind: FittedLine(**plain["lines"][kind]) for kind in PATHS if kind in plain["lines"]
    }
    held: dict[Kind, HeldOutError] = {
        kind: HeldOutError(**plain["held_out"][kind]) for kind in PATHS if kind in plain["held_out"]
    }
    return Measured(
        str(plain["recipe"]), int(plain["threads"]), dict(plain["methods"]), lines, held, int(plain["row_bytes"]),
        dict(plain.get("beside", {})), dict(plain.get("shared", {})),
    )  # fmt: skip


@dataclass
class Measuring:
    """Runs a grid on a profiler, half of it to fit lines to and the other half to hold them against."""

    profiler: StepProfiler
    grid: Grid
    seen: list[Timed] = field(default_factory=list)
    unseen: list[Timed] = field(default_factory=list)

    def run(self, tell: Callable[[], object] = lambda: None) -> None:
        """Measure everything; `tell` hears of each run of a size.

        Sizes of the fit and those held out take turns, and every round goes through all of them: what a machine does
        differently for a while meets both alike, and one round of three.
        """
        seen, unseen = list(self._sizes(self.grid.seen())), list(self._sizes(self.grid.held_out()))
        every = sorted({*seen, *unseen}, key=lambda size: (size.context, size.decode, size.prefill))
        self.profiler.check(every)
        runs: dict[Size, list[list[Timed]]] = {size: [] for size in every}
        for _ in range(self.grid.rounds):
            for size in every:
                runs[size].append(self.profiler.run(size))
                tell()
        self.profiler.leave()
        for where, kept in ((self.seen, seen), (self.unseen, [size for size in unseen if size not in {*seen}])):
            where += [timed for size in kept for timed in medians(runs[size])]

    def _sizes(self, every: Sequence[Size]) -> Iterator[Size]:
        return iter(dict.fromkeys(spared(size, self.profiler.engine) for size in every))

    def lines(self) -> tuple[dict[Kind, FittedLine], dict[Kind, HeldOutError]]:
        """A line per path, and how far it is off on the sizes held out."""
        lines: dict[Kind, FittedLine] = {}
        held: dict[Kind, HeldOutError] = {}
        for kind in PATHS:
            lines[kind] = fit([one for one in self.seen if path_of(one.step) == kind], kind)
            off = errors(lines[kind], [one for one in self.unseen if path_of(one.step) == kind])
            if off:
                held[kind] = HeldOutError.of(off)
        return lines, held


def flops(rounds: int) -> float:
    """Operations per second of a product of many rows with a large weight: the most that anything reaches here."""
    import torch

    from phasewise.bench.bandwidth import best
    from phasewise.ops.linear import Linear

    rows, outputs, inputs = 512, 4096, 2048
    weight = Linear(torch.full((outputs, inputs), 0.5, dtype=torch.bfloat16))
    given = torch.ones(rows, inputs, dtype=torch.bfloat16)
    with torch.inference_mode():
        return 2 * rows * outputs * inputs / best(lambda: weight(given), rounds)
