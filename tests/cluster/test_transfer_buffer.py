"""The transfer buffers: what is put down is what is picked up, whoever dies, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from phasewise.cluster import transfer_buffer as transfer_buffer
from phasewise.cluster.process import PREFIX, sweep_dead
from phasewise.cluster.transfer_buffer import InlineBuffer, Lost, Parcel, SharedMemoryBuffer, folder, segment, sweep

RUN = f"{PREFIX}.{os.getpid()}.test"
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool,
]  # fmt: skip


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    assert sweep(RUN) == 0, "a test has left segments behind"


def names() -> set[str]:
    return {path.name for path in folder().glob(f"{RUN}*")}


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.rand(shape) * 100).to(dtype)


def travels(parcel: Parcel) -> Parcel:
    return dict(json.loads(json.dumps(parcel)))


# ---- files in shared memory
def test_all_kinds_of_tensors_arrive_as_they_left() -> None:
    here, there = SharedMemoryBuffer(RUN, "a"), SharedMemoryBuffer(RUN, "b")
    tensors = [some(dtype, *shape) for dtype in DTYPES for shape in [(), (7,), (3, 5, 2), (0,), (2, 0)]]
    tensors.append(some(torch.float32, 6, 9)[:, 2:7].T)  # not contiguous
    parcel = here.put(tensors)
    got = there.get(travels(parcel))
    assert [t.dtype for t in got] == [t.dtype for t in tensors]
    assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))
    there.drop(parcel)
    assert all(torch.equal(a, b) for a, b in zip(got, tensors)), "mapped memory outlives its name"


def test_what_is_dropped_while_it_is_picked_up_does_not_come_back() -> None:
    here, there, held = SharedMemoryBuffer(RUN, "a"), SharedMemoryBuffer(RUN, "b"), torch.arange(1, 1000)
    made: list[Parcel] = [here.put([held])]
    with ThreadPoolExecutor(1) as other:

        def pick_up() -> int:
            got = 0
            while made:
                with suppress(Lost, IndexError):
                    (tensor,) = there.get(made[-1])
                    assert torch.equal(tensor, held)
                    got += 1
            return got

        picked = other.submit(pick_up)
        for _ in range(3000):
            here.drop(made[-1])
            made[-1] = here.put([held])
        here.drop(made.pop())
        assert picked.result() > 0
    assert not names()


def test_no_tensors_are_a_parcel_too() -> None:
    here = SharedMemoryBuffer(RUN, "a")
    parcel = here.put([])
    assert here.get(parcel) == []
    here.drop(parcel)


def test_a_parcel_that_is_gone_is_lost_and_may_be_dropped_again() -> None:
    here = SharedMemoryBuffer(RUN, "a")
    parcel = here.put([torch.ones(3)])
    here.drop(parcel)
    here.drop(parcel)
    with pytest.raises(Lost, match=parcel["segment"]):
        here.get(parcel)


def test_a_segment_of_another_size_is_not_mapped() -> None:
    here = SharedMemoryBuffer(RUN, "a")
    parcel = here.put([torch.ones(64)])
    os.truncate(folder() / parcel["segment"], 8)
    with pytest.raises(Lost):
        here.get(parcel)
    here.drop(parcel)


def test_parcels_are_never_named_alike() -> None:
    here, there = SharedMemoryBuffer(RUN, "a"), SharedMemoryBuffer(RUN, "b")
    parcels = [where.put([torch.ones(1)]) for where in (here, there, here)]
    assert len({parcel["segment"] for parcel in parcels}) == 3
    with pytest.raises(FileExistsError):
        segment(parcels[0]["segment"], 64, create=True)
    for parcel in parcels:
        here.drop(parcel)


def test_where_there_is_no_room_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transfer_buffer.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        SharedMemoryBuffer(RUN, "a").put([torch.ones(1000)])
    assert names() == set()


def test_what_a_dead_worker_has_put_down_is_cleared_but_for_what_others_wait_for() -> None:
    router, dead, other = (
        SharedMemoryBuffer(RUN, "router"),
        SharedMemoryBuffer(RUN, "decode-1"),
        SharedMemoryBuffer(RUN, "decode-11"),
    )
    kept, lost, theirs = (where.put([torch.ones(2)]) for where in (dead, dead, other))
    router.clear("decode-1", [travels(kept)])
    assert names() == {kept["segment"], theirs["segment"]}
    assert torch.equal(router.get(kept)[0], torch.ones(2))
    with pytest.raises(Lost):
        router.get(lost)
    assert sweep(RUN) == 2


def test_the_next_server_sweeps_up_after_the_dead_only() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    dead, mine, stranger = f"{PREFIX}.{pid}.x.decode-0.3", f"{RUN}.decode-0.3", f"{PREFIX}-notes"
    for name in (dead, mine, stranger):
        (folder() / name).touch()
    sweep_dead()
    left = {name for name in (dead, mine, stranger) if (folder() / name).exists()}
    assert left == {mine, stranger}
    for name in left:
        (folder() / name).unlink()


# ---- within one process
def test_an_inline_buffer_serves_many() -> None:
    shelf = InlineBuffer()
    a, b = shelf.at("a"), shelf.at("b")
    tensor = torch.arange(4)
    kept, lost, theirs = a.put([tensor]), a.put([]), b.put([tensor, tensor])
    assert b.get(travels(kept))[0] is tensor
    shelf.clear("a", [kept])
    with pytest.raises(Lost):
        b.get(lost)
    for parcel in (kept, theirs, kept):
        shelf.drop(parcel)
    assert not shelf.parcels and not a.parcels
