"""Prompts' KV below the budget, over whole engines: found again in memory and after a restart, and the same tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phasewise.builder import Builder
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv.prefix import BLOCK
from phasewise.kv.tiers import tiers
from phasewise.model.model import Model
from phasewise.options import parse, parse_recipes
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny

PROMPT, OTHER = tiny.prompts(230, 170)
HELD = 229 // BLOCK * BLOCK  # rows of PROMPT that may come from elsewhere
N = 10
GREEDY = tiny.greedy(N)
DRAWN = Params(max_tokens=N, ignore_eos=True, temperature=0.8, seed=5)
FORMS = ("slab", "int8", "kivi", "gear", "cachegen:level=0", "cachegen:level=0,rest=int8")


class Started:
    """Engines over one folder, each closed before the next one begins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.engine = folder, None

    def __call__(self, verbs: dict[str, str] | None = None, *, of: Model | None = None, **limits: Any) -> Engine:
        self.close()
        limits = {"kv_bytes": 64 << 20, "kv_disk": str(self.folder), "kv_disk_bytes": 1 << 30} | limits
        self.engine: Engine | None = tiny.engine(verbs, of=of, **limits)  # type: ignore[assignment]
        assert isinstance(self.engine, Engine)
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path / "kv")
    yield started
    started.close()


def asked(engine: Engine, prompt: list[int] = PROMPT, params: Params = GREEDY) -> tuple[list[int], int]:
    """The tokens, and how many rows of the prompt were not computed."""
    request = Request(prompt, params)
    engine.add(request)
    tiny.finish(engine, [request])
    return tiny.outs([request])[0], request.cached


def settled(engine: Engine) -> None:
    """Return when nothing waits to be written."""
    below = engine.prefixes.tiers
    assert below is not None
    soon(lambda: not below._writes)


def soon(true: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.001)


@pytest.mark.parametrize("form", FORMS)
def test_after_a_restart_tokens_are_those_that_computing_gives(start: Started, form: str) -> None:
    verbs = {"store": form}
    computed = [tiny.outs(tiny.run(tiny.engine(verbs), [PROMPT], params))[0] for params in (GREEDY, DRAWN)]
    assert asked(start(verbs)) == (computed[0], 0)
    for tokens, params in zip(computed, (GREEDY, DRAWN)):
        engine = start(verbs)
        assert asked(engine, params=params) == (tokens, HELD)
        assert engine.tiers["disk_hits"] == HELD // BLOCK and engine.counters.prompt_rows == len(PROMPT) - HELD
    engine = start(verbs)
    longer = PROMPT + OTHER  # the next turn of a conversation
    assert asked(engine, longer) == (tiny.outs(tiny.run(tiny.engine(verbs), [longer], GREEDY))[0], HELD)


@pytest.mark.parametrize("form", ["slab", "int8", "kivi"])
def test_what_the_budget_gives_up_is_in_memory(form: str) -> None:
    plain: Any = tiny.engine({"store": form})
    tokens, room = asked(plain)[0], plain.parts.store.cost(len(PROMPT) + N) * 5 // 4
    engine: Any = tiny.engine({"store": form}, kv_bytes=room, kv_host=1 << 20)
    assert asked(engine) == (tokens, 0)
    asked(engine, OTHER)
    engine.forget_prefixes()
    assert engine.kv_bytes == 0 and 0 < engine.tiers["memory_bytes_held"] <= 1 << 20
    assert asked(engine) == (tokens, HELD) and engine.tiers["memory_hits"] == HELD // BLOCK
    engine.forget_prefixes()
    assert asked(engine) == (tokens, HELD), "what was taken from memory is still there"


def test_memory_keeps_its_bound_and_hands_down(start: Started) -> None:
    block = PREFIX = 4 * 2 * 12 * 2 * 4 * BLOCK  # bytes: layers, heads, numbers, keys and values, float32
    engine = start(kv_host=3 * block)
    asked(engine)
    engine.forget_prefixes()
    assert engine.tiers["memory_bytes_held"] == 3 * PREFIX and engine.tiers["memory_evicted"] == HELD // BLOCK - 3
    settled(engine)
    assert engine.tiers["disk_bytes_held"] > HELD // BLOCK * block
    assert asked(engine)[1] == HELD and engine.tiers["memory_hits"] == 3, "the first rows are the last to leave"


def test_others_go_on_while_a_request_waits_for_its_rows(start: Started) -> None:
    tokens, _ = asked(start())
    engine = start()
    assert engine.prefixes.tiers is not None and engine.prefixes.tiers.folder is not None
    medium = engine.prefixes.tiers.folder.medium = Gate()
    waiting, gone, other = Request(PROMPT, GREEDY), Request(PROMPT, GREEDY), Request(OTHER, GREEDY)
    for request in (waiting, gone, other):
        engine.add(request)
    while other.left is None:
        engine.step()
    assert waiting in engine.waiting and not waiting.computed
    engine.cancel(gone)
    medium.open.set()
    tiny.finish(engine, [waiting])
    assert (waiting.out, waiting.cached) == (tokens, HELD)


def test_who_has_waited_long_goes_on_without(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, _ = asked(start())
    engine = start()
    monkeypatch.setattr(tiers, "PATIENCE", 0.05)
    assert engine.prefixes.tiers is not None and engine.prefixes.tiers.folder is not None
    medium = engine.prefixes.tiers.folder.medium = Gate()
    assert asked(engine) == (tokens, 0)
    medium.open.set()


class Gate:
    """A disk that gives nothing until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def carried(self, n_bytes: int) -> None:
        self.open.wait(20.0)


def test_a_disk_that_is_slow_to_write_delays_nothing(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, opened = start(), threading.Event()
    assert engine.prefixes.tiers is not None and engine.prefixes.tiers.folder is not None
    folder, real = engine.prefixes.tiers.folder, type(engine.prefixes.tiers.folder).write
    monkeypatch.setattr(type(folder), "write", lambda *given: opened.wait(20.0) and real(*given))
    monkeypatch.setattr(tiers, "PENDING", 4 * 24576)
    asked(engine)
    assert engine.tiers["disk_writes_dropped"] and engine.tiers["disk_bytes_held"] == 0
    opened.set()
    settled(engine)
    assert asked(engine)[1] == 4 * BLOCK, "what had no room in the queue was left out"
    settled(engine)
    assert asked(engine)[1] == HELD, "and came there with the next request"


def test_damage_is_a_miss(start: Started) -> None:
    tokens, _ = asked(start())
    start.close()
    for at, file in enumerate(sorted(path for path in start.folder.glob("*/??/*"))):
        data = bytearray(file.read_bytes())
        data[997 * (at + 1) % len(data)] ^= 4
        file.write_bytes(data)
    start.engine = None
    engine = start()
    assert asked(engine) == (tokens, 0) and engine.tiers["disk_refused"] == 1, "nothing behind it is of use"


def test_rows_of_other_weights_forms_and_methods_are_never_found(start: Started) -> None:
    asked(start())
    model = Model.load(tiny.checkpoint(), dtype=torch.bfloat16)
    rounded = Model.load(tiny.checkpoint(), dtype=torch.int8)
    found = [
        asked(start(verbs, of=of))[1]
        for verbs, of in (
            ({"store": "int8"}, None), ({"evict": "snapkv"}, None), ({}, tiny.model(seed=1)), ({}, model),
            ({}, rounded), ({"decode": "block_diffusion"}, None),
        )
    ]  # fmt: skip
    assert found == [0] * len(found) and asked(start())[1] == HELD


def test_a_name_on_disk_is_the_same_in_every_process(start: Started) -> None:
    """Nothing that a process makes up, such as the order of a set, may be in what names blocks."""
    engine = start({"attend": "hydragen", "decode": "contrastive:amateur=tiny-draft"})
    assert engine.store.tree is not None and engine.prefixes.tiers is not None
    (key,) = engine.prefixes.trees
    assert " at 0x" not in key and "frozenset" not in key and "{" not in key


def test_what_nothing_would_come_of_is_refused_by_name(start: Started) -> None:
    def refused(why: str, verbs: dict[str, str] | None = None, **limits: Any) -> None:
        with pytest.raises(UserError, match=why):
            start(verbs, **limits)
        start.engine = None

    refused("leave --no-prefix-cache out", prefix_cache=False)
    refused("leave --place disaggregated out", {"place": "disaggregated"})
    refused("evict h2o are not", {"evict": "h2o"})
    refused("--kv-host keeps prompts", {"store": "zipcache"}, kv_disk=None, kv_host=1 << 20)
    refused("attend power makes prompts' KV with weights of its own", {"attend": "power:weights=random:1"})
    asked(start())
    with pytest.raises(UserError, match="in use by another server"):
        tiny.engine(kv_disk=str(start.folder), kv_disk_bytes=1 << 30)
    memory: Any = tiny.engine({"attend": "power:weights=random:1"}, kv_host=1 << 20)
    assert memory.tiers == {"memory_bytes_held": 0, "memory_hits": 0, "memory_evicted": 0}
    methods, limits = parse({}), Limits(kv_host=1 << 20)
    recipes = parse_recipes({}, {"thrifty": {"evict": "h2o"}})
    with pytest.raises(UserError, match="evict h2o of recipe 'thrifty' are not"):
        Builder(tiny.model(), methods, limits, load=tiny.load, recipes=recipes).build()
