"""The laboratory of systems: models by name, an engine per contender, loads played and kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from phasewise.builder import Builder
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.engine.assembly import kv_shapes
from phasewise.engine.limits import Limits
from phasewise.kv.format import Raw, entry_bytes
from phasewise.load import dtype_of
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.reproduce.coded_models import CODED, QUICKLY
from phasewise.reproduce.models import Shelf
from phasewise.reproduce.play import LoadEntry, PlayedRun, play
from phasewise.reproduce.system import Case, Load, Setting
from phasewise.reproduce.workload import STRANGER, PromptSource
from phasewise.verbs.place import Placed

ANSWERING = ("pocket", STRANGER)  # models whose answers are graded
TINY = {
    "random-experts": "tiny-experts",
    "random-dense": "tiny-dense",
    "pocket-eagle": "pocket-eagle-quickly",
    "pocket-trigram-rivals": "pocket-trigram-rivals-quickly",
    "pocket-falcon-plain": "pocket-falcon-plain-quickly",
    "pocket-1kv-caches-taught": "pocket-1kv-caches",
    "pocket-1kv-mean-taught": "pocket-1kv-mean",
    **dict.fromkeys(
        ("pocket-lq", "pocket-lq-zero", "pocket-lq-split", "pocket-lq-random", "pocket-lq-levels"), "pocket-lq-quickly"
    ),
    **dict.fromkeys(CODED, QUICKLY),
    **dict.fromkeys(
        ("pocket-1-8-decay", "pocket-1-8-sr-ste", "pocket-1-8-magnitude", "pocket-1-8-chance"), "pocket-1-8"
    ),
    **dict.fromkeys(("pocket-2-4-decay", "pocket-2-4-sr-ste"), "pocket-2-4"),
}  # stand-ins in a quick run


@dataclass(frozen=True)
class Scale:
    """The amount of work. None: as much as the system asks for."""

    examples: int | None = None
    rounds: int = 5
    seed: int = 0
    time: bool = True
    quick: bool = False


class Lab:
    """Models are loaded once; those that have to be made lie under `room`."""

    def __init__(self, room: Path, scale: Scale) -> None:
        self.scale, self.shelf = scale, Shelf(room)
        self._models: dict[tuple[str, str | None], Model] = {}
        self.grades: dict[str, list[float]] = {}  # by what was asked of whom: nobody is asked the same twice

    @classmethod
    @contextmanager
    def open(cls, scale: Scale) -> Iterator[Lab]:
        """One whose models are gone in the end."""
        with TemporaryDirectory(prefix="phasewise-reproduce-") as room:
            yield cls(Path(room), scale)

    def model(self, name: str, dtype: str | None = None) -> Model:
        name = self.real(name)
        if (name, dtype) not in self._models:
            self._models[name, dtype] = Model.load(self.shelf.path(name), dtype=dtype_of(dtype))
        return self._models[name, dtype]

    def baselines(self) -> dict[str, list[float]]:
        """The grades of the default methods, which systems have in common."""
        defaults = tuple(f"({Setting(model=name)!r}, " for name in ("", *ANSWERING))
        return {asked: grades for asked, grades in self.grades.items() if asked.startswith(defaults)}

    def real(self, name: str) -> str:
        """The model that stands for `name` at this scale."""
        return TINY.get(name, name) if self.scale.quick else name

    def asked(self, name: str, number: int = 0) -> PromptSource:
        """The prompts of round `number`; no prompt comes twice."""
        vocab = self.model(name).config.vocab
        return PromptSource(vocab, self.scale.seed * 1000 + number, self.scale.quick)

    @contextmanager
    def engine(
        self, setting: Setting, name: str = "pocket", dtype: str | None = None, **objects: Any
    ) -> Iterator[Placed]:
        """A fresh engine, dismissed at the end. Raises UserError for what does not fit."""
        name = setting.model or name
        model = self.model(name, dtype)
        limits = Limits(max_running=setting.most, prefix_cache=setting.prefix_cache, cluster=setting.cluster)
        methods = {**parse(setting.verbs), **setting.objects, **objects}
        spec = EngineSpec(self.shelf.path(self.real(name)), limits, dtype, verbs=dict(setting.verbs))

        def second(wanted: str) -> Model:
            return self.model(wanted, dtype)

        engine = Builder(model, methods, limits, load=second, spec=spec).build()
        try:
            yield engine
        finally:
            engine.close()

    def play(self, setting: Setting, entries: Sequence[LoadEntry], name: str, dtype: str | None = None) -> PlayedRun:
        """A load on an engine of its own, every step watched."""
        with self.engine(setting, name, dtype) as engine:
            return play(engine, entries)

    def case(self, settings: dict[str, Setting], load: Load, name: str, dtype: str | None = None) -> Case:
        """The load for every setting by role; one that has a load of its own gets that."""
        runs = {
            role: self.play(setting, (setting.load or load)(self.asked(name)), name, dtype)
            for role, setting in settings.items()
        }
        model = self.model(name, dtype)
        row = sum(entry_bytes(Raw(), shape) * shape.heads for shape in kv_shapes(model))
        return Case(runs, model.config, row)
