"""What a GPU would find: every method, draft trees, the limit of KV and attention on its side.

Nothing here has a GPU. `tests/elsewhere.py` is a device whose tensors hold values, so that an engine runs whole. Where
it mixes devices a GPU raises, and where it reads values it waits. `ratchets.toml` lists who reads.
"""

from __future__ import annotations

import tomllib
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
from phasewise.request.params import Params
from phasewise.step.span import ancestors
from tests import tiny
from tests.elsewhere import DEVICE, Elsewhere, There
from tests.laws.settings import discovered, guarantee, options

CUDA = torch.device("cuda", 0)
LISTED = set(tomllib.loads((Path(__file__).parent / "ratchets.toml").read_text(encoding="utf-8"))["read_on_the_host"])
METHODS = discovered()
PROMPTS, NEW = (90, 41), 6
ASKED = (tiny.greedy(NEW), Params(max_tokens=NEW, ignore_eos=True, temperature=0.8, top_p=0.9, seed=1))


@cache
def model(path: Path | str) -> Model:
    return Model.load(path, device=DEVICE)


def second(name: str) -> Model:
    return model({"tiny": tiny.checkpoint(), "tiny-draft": tiny.checkpoint(layers=2, seed=1)}.get(name, name))


def run(verbs: dict[str, str], seen: Elsewhere) -> list[list[int]]:
    with seen:
        made = Builder(model(tiny.checkpoint()), parse(verbs), Limits(kv_bytes=64 << 20), load=second).build()
        return tiny.outs(tiny.run(made, tiny.prompts(*PROMPTS), ASKED))


@cache
def ran(verb: str, name: str) -> tuple[list[list[int]], Elsewhere]:
    """The tokens of a greedy and a sampled request under a method at work there, and what was seen."""
    seen = Elsewhere()
    return run(options(verb, name), seen), seen


def test_plain_tokens_are_the_processors() -> None:
    assert run({}, Elsewhere()) == tiny.plain(tiny.prompts(*PROMPTS), ASKED)


@pytest.mark.parametrize(("verb", "name"), METHODS)
def test_a_method_mixes_no_devices_and_reads_where_it_is_listed(verb: str, name: str) -> None:
    outs, seen = ran(verb, name)
    assert [len(out) for out in outs] == [NEW, NEW] and seen.calls > 1000
    if guarantee(verb, name) != "lossy":
        assert outs[0] == tiny.plain(tiny.prompts(*PROMPTS), ASKED)[0], "values are lost"
    assert not seen.mixed
    assert not seen.reads.keys() - LISTED, "a GPU would be waited for: read once, later, or list it in ratchets.toml"


def test_who_reads_no_more_is_taken_off_the_list() -> None:
    """All methods run here, if they have not yet."""
    read = {where for verb, name in METHODS for where in ran(verb, name)[1].reads}
    assert not LISTED - read, "take these out of ratchets.toml"


def test_draft_trees_lie_on_the_models_device() -> None:
    seen = Elsewhere()
    run({"draft": "draft_model:model=tiny-draft,k=3,branches=2"}, seen)
    assert not seen.mixed
    with Elsewhere():
        assert ancestors([-1, 0, 0], DEVICE).device == DEVICE


# ---- what finds this can find it
@pytest.mark.parametrize("inference", [False, True])
def test_mixing_and_reading_are_seen(inference: bool) -> None:
    with Elsewhere() as seen, torch.inference_mode(inference):
        there, here = torch.arange(4, device=DEVICE), torch.arange(4)
        assert isinstance(there, There) and not seen.mixed and not seen.reads
        assert (there + 1).device == DEVICE and (there + torch.tensor(1)).device == DEVICE and not seen.mixed
        assert there[here].device == DEVICE and not seen.mixed  # a GPU takes indices of the processor
        torch.add(there, here)
        assert sum(seen.mixed.values()) == 1
        there[here] = there.flip(0)
        assert sum(seen.mixed.values()) == 1
        there[here] = here.clone()
        assert sum(seen.mixed.values()) == 2
        odd = (there & 1).bool()
        reads = (
            lambda: int(there[2]), lambda: bool(there.any()), there.tolist, there.cpu, lambda: there.to("cpu"),
            lambda: there.nonzero(), lambda: there[odd], lambda: there.unique(), lambda: torch.equal(there, there),
        )  # fmt: skip
        for read in reads:
            before = sum(seen.reads.values())
            read()
            assert sum(seen.reads.values()) == before + 1
        assert there.tolist() == [0, 1, 2, 3] and here.to(DEVICE).tolist() == [0, 1, 2, 3]
        before = sum(seen.reads.values())
        there[odd] = there[odd.logical_not().logical_not()][[0, 0]]  # read to be taken, and where more than one is put
        assert sum(seen.reads.values()) == before + 2 and there.tolist() == [0, 1, 2, 1]
        before = sum(seen.reads.values())
        there[odd] = 1
        assert sum(seen.reads.values()) == before and torch.as_tensor(there, device=DEVICE) is there
        there[1:3] = torch.tensor([7, 8], device=DEVICE)
        there.mul_(2)
        assert there.tolist() == [0, 14, 16, 2]


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
