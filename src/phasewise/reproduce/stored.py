"""Contexts stored on disk, loaded over a simulated medium: it waits as long as its bytes a second would take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from phasewise.builder import Builder
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.methods.store.cachegen import CacheGen
from phasewise.model import artefacts
from phasewise.options import parse
from phasewise.reproduce.lab import Lab
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.train.artefacts.attend_double_sparsity import stretches
from phasewise.train.artefacts.store_cachegen import measure

FOLDER = 1 << 33  # bytes
TEXTS = 8  # of 512 tokens, from which symbol tables are profiled


class SlowMedium:
    """A disk or a link of so many bytes a second. Nothing is really slow: the reader sleeps."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth

    def carried(self, n_bytes: int) -> None:
        time.sleep(n_bytes / self.bandwidth)


def profiled(lab: Lab, model: str) -> Path:
    """The file of symbol tables for a model, made here."""
    loaded, path = lab.model(model), lab.shelf.room / f"{model}-tables.safetensors"
    if not path.is_file():
        tensors = measure(loaded, stretches(lab.shelf.path(lab.real(model)), TEXTS, lab.scale.seed), 1)
        made = CacheGen().artefact(loaded.config)
        artefacts.save(path, made, tensors, artefacts.fingerprint(loaded), "phasewise reproduce cachegen")
    return path


def times(
    lab: Lab, model: str, prompt: Sequence[int], stores: Mapping[str, str], bandwidth: float
) -> dict[str, tuple[float, int]]:
    """Of each store, the seconds to the first token of a prompt that an engine before has stored in its form, and the
    bytes read for it; `computed`: the seconds where nothing is stored."""
    found = dict[str, tuple[float, int]]()
    for name, store in stores.items():
        with tempfile.TemporaryDirectory(prefix="phasewise-stored-") as folder:
            for turn in ("computed", name):
                engine = Builder(
                    lab.model(model), parse({"store": store}),
                    Limits(kv_disk=f"{folder}/kv", kv_disk_bytes=FOLDER), load=lab.model,
                ).build()  # fmt: skip
                assert isinstance(engine, Engine)
                try:
                    found[turn] = _first(engine, prompt, bandwidth if turn == name else None)
                finally:
                    engine.close()
    return found


def _first(engine: Engine, prompt: Sequence[int], bandwidth: float | None) -> tuple[float, int]:
    """Seconds to the first token, once a prompt of other tokens has been answered, and bytes read for it."""
    below = engine.prefixes.tiers
    assert below is not None and below.folder is not None
    below.folder.medium = None if bandwidth is None else SlowMedium(bandwidth)
    before = 0
    for tokens in (prompt[::-1][:64], prompt):
        before = below.folder.counts.read_bytes
        request = Request(tokens, Params(max_tokens=2, ignore_eos=True))
        engine.add(request)
        while request.left is None:
            engine.step()
    assert request.trace.ttft is not None, request.left
    return request.trace.ttft, below.folder.counts.read_bytes - before
