"""Prompts' KV on its way between engines: few bits per number, coded to their entropy (CacheGen, arXiv 2310.07240).

Promises, at a fixed level, that no number arrives further off than half a step of its row, and that a request's tokens
do not depend on where it runs or on what is lost on the way. At rest rows are plain, or in the form of another store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from phasewise.catalog import name_of, part
from phasewise.errors import UserError
from phasewise.kv.format import KVShape, Raw, RowFormat
from phasewise.kv.tiers.codec import BlockCodec, BlockLayout
from phasewise.kv.wire import Numbers, Wire
from phasewise.methods.store._cachegen import entropy, tables
from phasewise.methods.store._cachegen.chunked import Chunked, ChunkPlan
from phasewise.methods.store._cachegen.rounding import LEVELS
from phasewise.methods.store._cachegen.stored import StoredBlocks
from phasewise.methods.store._cachegen.tables import SymbolTables
from phasewise.methods.store.slab import SlabStore
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class CacheGen(Method, Storing):
    """A row of a layer's keys or values is rounded to some tens of steps of its largest number, fewer in deep layers.
    Chunks of `chunk` rows are coded one by one, each with the distributions of its channels' symbols, so nothing is
    calibrated. Level 0 sends rows as they are, 1 to 4 ever coarser ones. Prompts are rounded once, when complete, on
    engines that keep them as well; rows of emitted tokens are never rounded.

    `level=auto` chooses a level per chunk, so that a move takes at most `deadline` seconds over a link of `bandwidth`
    bytes a second (None = as placements report it; level 2 until one does). Where no level is fast enough, a suffix of
    the prompt may be left for the receiver to compute again: with even costs, all of it. What arrives then depends on
    the link, and so may tokens.

    `rest` is the store that keeps rows before they leave and where they have arrived: `slab`, `int8`, `kivi`, `gear`,
    `zipcache`. What packs blocks of rows packs what has come, or would have come, over the wire; `int8` rounds it once
    more. With `zipcache` the sums by which rows are put in classes travel beside them, and no prefix is shared.

    Prompts that `--kv-disk` keeps are written in this form, block by block (`phasewise serve --kv-disk`): what comes
    back is rounded, so answers may depend on whether a prompt was found. With a fixed level a block has one version.
    `level=auto` writes all five, and a reader takes for each block the best at which the rest of the prompt would be
    there within `deadline`, by what the blocks before it took. `weights` are tables of symbols for every channel,
    profiled once for the model (`phasewise train artefact store.cachegen`): `auto`, a file, or `none`, where each block
    brings its own: on the pocket model a twentieth more bytes, and longer to write.

    `group` above 1 codes rows as differences from the first of their group, as in the paper (not in its code); on the
    pocket model that costs bytes and precision. Left out: contexts on other machines, adapting between the chunks of
    a move between engines (for which one plan is made, with tables of its own), sending while the prompt is still
    computed, recomputing chunks in the middle, and computing what a slow disk would bring too late.
    """

    level: Literal["auto", 0, 1, 2, 3, 4] = 2
    chunk: int = 256
    group: int = 1
    deadline: float = 2.0
    bandwidth: float | None = None
    weights: str = "none"
    rest: Any = part("store", "slab")

    paper: ClassVar[str] = "arXiv 2310.07240"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"level": 0}
    tight: ClassVar[dict[str, object]] = {"level": 4, "chunk": 16}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"level": 1}, {}, {"level": 4})

    def __post_init__(self) -> None:
        for name in ("chunk", "group"):
            if getattr(self, name) < 1:
                raise UserError(f"cachegen: {name}={getattr(self, name)} must be at least 1 (rows)")
        if not self.deadline > 0:
            raise UserError(f"cachegen: deadline={self.deadline} must be positive (seconds)")
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise UserError(f"cachegen: bandwidth={self.bandwidth} must be positive (bytes a second)")
        if self.rest.traits.own_wire:
            sends = f"cachegen: rest={name_of('store', self.rest)} sends rows itself"
            raise UserError(f"{sends}: choose slab, int8, kivi, gear or zipcache")
        if self.level != 0:
            try:
                entropy.library()
            except ModuleNotFoundError:
                raise UserError(
                    "store cachegen needs the entropy coder of the package constriction, which is not installed: "
                    "pip install 'phasewise[cachegen]', or choose cachegen:level=0, which sends KV without coding"
                ) from None

    @property
    def traits(self) -> Traits:
        inner = "" if isinstance(self.rest, SlabStore) else f":rest={name_of('store', self.rest)}"
        rest: Traits = self.rest.traits
        return replace(rest, inner=inner, own_wire=True)

    def bind(self, host: Host) -> object:
        """Fills the other slots with what `rest` holds."""
        return self.rest.bind(host)

    def format(self) -> RowFormat:
        format: RowFormat = self.rest.format()
        return format

    def wire(self, shapes: Sequence[KVShape], unit: int) -> Wire | None:
        """For engines with these layers that compute prompts in blocks of `unit` rows; None = rows as they are."""
        if self.level == "auto" and self.chunk % unit:
            raise UserError(f"cachegen: chunk={self.chunk} must be a multiple of the decode method's block of {unit}")
        level = None if self.level == "auto" else self.level
        cut = ChunkPlan(level, self.chunk, self.group, self.deadline)
        if level == 0:
            return None
        wire, format = Chunked(cut, shapes, self.bandwidth), self.format()
        return wire if isinstance(format, Raw) else Numbers(wire, format, shapes[0].dtype)

    def artefact(self, config: ModelConfig) -> Artefact:
        """The symbol tables of every level."""
        shapes = tables.shapes(config.layers, config.kv_heads * config.head_dim, self.group)
        return Artefact("store.cachegen", shapes, {"group": self.group}, without="say weights=none")

    def blocks(self, host: Host, shapes: Sequence[KVShape], layout: BlockLayout) -> BlockCodec | None:
        if self.level == 0:
            return None
        found = None
        if self.weights != "none":
            found = SymbolTables(host.artefact(self.artefact(host.model.config), self.weights))
        cut = ChunkPlan(None if self.level == "auto" else self.level, layout.rows, self.group, self.deadline)
        levels = range(len(LEVELS) + 1) if self.level == "auto" else [self.level]
        return StoredBlocks(Chunked(cut, shapes, self.bandwidth, found), levels, shapes, self.format(), layout)
