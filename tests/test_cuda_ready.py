"""What a GPU would find: draft trees, the limit of KV and attention on its side.

Nothing here has a GPU. `tests/elsewhere.py` is a device whose tensors hold values, so that an engine runs whole. Where
it mixes devices a GPU raises, and where it reads values it waits.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from phasewise import load
from phasewise.builder import Builder
from phasewise.engine import limits
from phasewise.engine.limits import Limits
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.step.span import ancestors
from tests import tiny
from tests.elsewhere import DEVICE, Elsewhere, There

CUDA = torch.device("cuda", 0)


@cache
def model(path: Path | str) -> Model:
    return Model.load(path, device=DEVICE)


def second(name: str) -> Model:
    return model({"tiny": tiny.checkpoint(), "tiny-draft": tiny.checkpoint(layers=2, seed=1)}.get(name, name))


def run(verbs: dict[str, str], seen: Elsewhere) -> list[list[int]]:
    with seen:
        made = Builder(model(tiny.checkpoint()), parse(verbs), Limits(kv_bytes=64 << 20), load=second).build()
        return tiny.outs(tiny.run(made, tiny.prompts(90, 41), tiny.greedy(10)))


def test_plain_tokens_are_the_processors() -> None:
    assert run({}, Elsewhere()) == tiny.outs(tiny.run(tiny.engine(), tiny.prompts(90, 41), tiny.greedy(10)))


def test_draft_trees_lie_on_the_models_device() -> None:
    seen = Elsewhere()
    run({"draft": "draft_model:model=tiny-draft,k=3,branches=2"}, seen)
    assert not seen.mixed
    with Elsewhere():
        assert ancestors([-1, 0, 0], DEVICE).device == DEVICE


# ---- what finds this can find it
def test_mixing_and_reading_are_seen() -> None:
    with Elsewhere() as seen:
        there, here = torch.arange(4, device=DEVICE), torch.arange(4)
        assert isinstance(there, There) and not seen.mixed and not seen.reads
        assert (there + 1).device == DEVICE and (there + torch.tensor(1)).device == DEVICE and not seen.mixed
        assert there[here].device == DEVICE and not seen.mixed  # a GPU takes indices of the processor
        torch.add(there, here)
        assert sum(seen.mixed.values()) == 1
        reads = (lambda: int(there[2]), lambda: bool(there.any()), there.tolist, there.cpu, lambda: there.to("cpu"))
        for read in reads:
            before = sum(seen.reads.values())
            read()
            assert sum(seen.reads.values()) == before + 1
        assert there.tolist() == [0, 1, 2, 3] and here.to(DEVICE).tolist() == [0, 1, 2, 3]
        there[1:3] = torch.tensor([7, 8], device=DEVICE)
        there.mul_(2)
        assert there.tolist() == [0, 14, 16, 6]


def test_a_mask_on_the_processor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.speculation.loop.ancestors", lambda parents, device: ancestors(parents))
    seen = Elsewhere()
    run({"draft": "draft_model:model=tiny-draft,k=3,branches=2"}, seen)
    assert seen.mixed or seen.reads


# ---- memory and attention
def test_kv_that_nobody_limits_lies_in_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (80 << 30, 140 << 30))
    assert Limits().on(CUDA) == Limits(kv_bytes=60 << 30) and asked == [CUDA]
    assert Limits(kv_bytes=5).on(CUDA) == Limits(kv_bytes=5)
    assert Limits().on(torch.device("cpu")) == Limits() and Limits().budget == limits.memory_default()


def test_cudnns_attention_is_off_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", said.append)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    assert load.usable("cpu").type == "cpu" and not said
    assert load.usable("cuda:0") == CUDA and said == [False]
