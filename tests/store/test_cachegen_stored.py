"""CacheGen's stored contexts: profiled tables, rows that come back within their bounds, levels that follow the disk."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phasewise.errors import Untrained, UserError
from phasewise.kv.format import KVShape, Raw
from phasewise.kv.tiers.codec import BlockLayout
from phasewise.kv.wire import Misfit
from phasewise.methods.store._cachegen import tables
from phasewise.methods.store._cachegen.chunked import Chunked, ChunkPlan
from phasewise.methods.store._cachegen.pacing import LoadPacer, VersionSpeeds
from phasewise.methods.store._cachegen.rounding import LEVELS
from phasewise.methods.store._cachegen.stored import StoredBlocks
from phasewise.methods.store._cachegen.tables import SymbolTables
from phasewise.methods.store.cachegen import CacheGen
from phasewise.model import artefacts
from phasewise.train.artefacts.store_cachegen import blocks, measure
from tests import tiny
from tests.kv.test_tiers import HELD, Started, asked

SHAPES = [KVShape(2, 12, torch.float32)] * 4  # those of the tiny model
LAYOUT = BlockLayout.of(SHAPES, Raw(), 32)


@cache
def profile(group: int = 1) -> dict[str, torch.Tensor]:
    return measure(tiny.model(), tiny.prompts(200, 160, seed=5), group)


def codec(levels: list[int], group: int = 1, profiled: bool = True) -> StoredBlocks:
    cut = ChunkPlan(levels[0] if len(levels) == 1 else None, 32, group, 2.0)
    found = SymbolTables(profile(group)) if profiled else None
    return StoredBlocks(Chunked(cut, SHAPES, None, found), levels, SHAPES, Raw(), LAYOUT)


@pytest.mark.parametrize("group", [1, 8])
def test_rows_come_back_within_half_a_step_at_every_level(group: int) -> None:
    (planes, *_), levels = blocks(tiny.model(), tiny.prompts(64)[0]), [0, 1, 2, 3, 4]
    coded = codec(levels, group)
    bodies = coded.encode(planes)
    assert [len(each) for each in bodies] == sorted(map(len, bodies), reverse=True)
    for version, body in enumerate(bodies):
        back = coded.decode(version, bytearray(body))
        for layer, (before, after) in enumerate(zip(planes, back)):
            for side, (x, y) in enumerate(zip(before, after)):
                if not version:
                    assert torch.equal(x, y)
                elif group == 1:
                    half = x.abs().amax((0, 2)) / (2 * LEVELS[version - 1].steps(layer, len(planes))[side])
                    assert bool(((x - y).abs().amax((0, 2)) <= 1.01 * half + 1e-6).all())
                else:
                    assert float((x - y).norm() / x.norm()) < 0.2


def test_profiled_tables_save_what_short_blocks_would_bring() -> None:
    (planes, *_) = blocks(tiny.model(), tiny.prompts(64, seed=9)[0])  # another text than was counted
    with_tables, without = (len(codec([2], profiled=which).encode(planes)[0]) for which in (True, False))
    assert with_tables < without


def test_numbers_that_are_not_finite_are_kept_as_they_are() -> None:
    (planes, *_) = blocks(tiny.model(), tiny.prompts(64)[0])
    planes = [[plane.clone() for plane in pair] for pair in planes]
    planes[1][0][0, 3, 2] = float("inf")
    coded = codec([2])
    (body,) = coded.encode(planes)
    assert body[0] == 0
    back = coded.decode(0, bytearray(body))
    assert all(torch.equal(x, y) for one, two in zip(planes, back) for x, y in zip(one, two))


def test_bytes_that_cannot_be_its_own_are_refused() -> None:
    coded = codec([2])
    (body,) = coded.encode(blocks(tiny.model(), tiny.prompts(64)[0])[0])
    for wrong in (b"", b"\x07", bytes([3]) + body[1:], body[:40], body[:1], b"\0" + body[1:]):
        with pytest.raises(Misfit):
            coded.decode(0, bytearray(wrong))
    other = codec([2], profiled=False)
    assert other.form != coded.form, "blocks of other tables have another name"


def test_a_symbol_that_calibration_never_met_is_coded_all_the_same() -> None:
    made = SymbolTables(profile())
    width = 2 * 12
    streams = [np.full((width, 32), 30 * (at % 2), np.uint8) for at in range(8)]
    back = made.decode(2, made.encode(2, streams), [each.shape for each in streams])
    assert all(np.array_equal(x, y) for x, y in zip(streams, back, strict=True))


def test_the_level_follows_what_the_blocks_before_took() -> None:
    sizes, speeds = (1000, 600, 300), VersionSpeeds()
    pacer = LoadPacer(speeds, deadline=1.0)
    assert pacer.choose(sizes, 10) == 1, "nothing is known yet"
    pacer.took(600, 0.01, 0.0)  # 60 kB/s: nine more of 1,000 bytes take 0.15 s
    assert pacer.choose(sizes, 9) == 0
    pacer.took(1000, 0.5, 0.0)  # the disk has become slow
    assert pacer.choose(sizes, 8) > 0
    pacer.took(600, 0.6, 0.0)
    assert pacer.choose(sizes, 7) == 2, "late as it is, the smallest"
    again = LoadPacer(speeds, deadline=100.0)
    assert again.choose(sizes, 7) == 0, "what was learnt is known to the next load"
    slow = VersionSpeeds(known=1e9)
    slow.took(1, 600, 0.0, 0.3)  # coded versions take long to decode
    assert LoadPacer(slow, 1.0).choose(sizes, 5) == 0 and slow.seconds(1, 600, 1e9) > 0.3


@pytest.fixture
def start(tmp_path: Path) -> Any:
    started = Started(tmp_path / "kv")
    yield started
    started.close()


@pytest.mark.parametrize("knobs", ["level=1", "level=2,rest=int8", "level=2,rest=kivi", "level=auto,bandwidth=1e12"])
def test_stored_contexts_come_back(start: Started, tmp_path: Path, knobs: str) -> None:
    made, path = CacheGen().artefact(tiny.model().config), tmp_path / "tables.safetensors"
    artefacts.save(path, made, profile(), artefacts.fingerprint(tiny.model()), "a test")
    verbs = {"store": f"cachegen:{knobs},weights={path}"}
    computed = asked(start(verbs))[0]
    tokens, cached = asked(start(verbs))
    assert cached == HELD
    if knobs.startswith("level=auto"):  # the disk is fast, so rows come as they are
        assert tokens == computed
    raw: Any = start({"store": f"cachegen:level=0,weights={path}"})
    asked(raw)
    if "rest" not in knobs and "auto" not in knobs:
        start.close()
        sizes = {space.name: sum(file.stat().st_size for file in space.rglob("*") if file.is_file())
                 for space in start.folder.iterdir() if len(space.name) == 32}  # fmt: skip
        assert min(sizes.values()) < 0.4 * max(sizes.values()), "float32 in about a byte"


def test_without_a_profile_it_says_how_to_make_one(start: Started) -> None:
    with pytest.raises(Untrained, match=r"phasewise train artefact store\.cachegen:group=1 --model .*say weights=none"):
        start({"store": "cachegen:level=2,weights=auto"})
    start.engine = None
    with pytest.raises(UserError, match="no such file"):
        start({"store": "cachegen:level=2,weights=nowhere.safetensors"})
    start.engine = None


def test_tables_are_for_this_very_model_and_group() -> None:
    found = tables.shapes(layers=4, width=24, group=8)
    assert found["2.classes"] == (4 * 2 * 2 * 24,) and found["4.codes"] == (tables.CLASSES, tables.ALPHABET)
    assert {name: tuple(each.shape) for name, each in profile(8).items()} == found
    assert all(int(each.max()) < 256 for each in profile(8).values()), "bfloat16 has them all"
