"""The tier on disk: whatever happens to its files, a block is what was written or it is not there."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.kv.format import KVShape, Raw
from phasewise.kv.tiers.block_file import HEADER, BlockName
from phasewise.kv.tiers.codec import BlockLayout, BlockPlanes, OnlyVersion, RawBlocks
from phasewise.kv.tiers.folder import MARK, PARTS, SECTOR, BlockFolder
from tests.forked import Forked

LAYOUT = BlockLayout.of([KVShape(2, 8, torch.float32)] * 2, Raw(), 32)
CODEC = RawBlocks(LAYOUT)
FILE = -(-(LAYOUT.bytes + HEADER) // SECTOR) * SECTOR  # bytes that a block takes
ROOM = 100 * FILE


def name(number: int, space: int = 0) -> BlockName:
    return BlockName((1000 + space).to_bytes(16), number.to_bytes(16))


def planes(number: int) -> BlockPlanes:
    gen = torch.Generator().manual_seed(number)
    return [[torch.randn(shape, generator=gen, dtype=dtype) for shape, dtype in layer] for layer in LAYOUT.kinds]


def write(folder: BlockFolder, number: int) -> bool:
    return folder.write(name(number), list(CODEC.encode(planes(number))))


def read(folder: BlockFolder, number: int, space: int = 0) -> bool:
    """True if the block is there; then it is what was written."""
    found = folder.read(name(number, space), CODEC, OnlyVersion(), 1)
    if found is None:
        return False
    assert all(torch.equal(a, b) for one, two in zip(found, planes(number), strict=True) for a, b in zip(one, two))
    return True


def file(folder: BlockFolder, number: int) -> Path:
    (found,) = folder.path.rglob(name(number).key.hex())
    return found


def test_blocks_come_back_after_the_folder_was_closed(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path / "kv", ROOM)
    assert all(write(folder, number) for number in range(5)) and folder.held == 5 * FILE
    assert not write(folder, 3), "it is there already"
    folder.close()
    again = BlockFolder(tmp_path / "kv", ROOM)
    assert len(again) == 5 and again.held == 5 * FILE
    assert all(read(again, number) for number in range(5)) and not read(again, 7)
    again.close()


def harmed(folder: BlockFolder, harm: str, path: Path) -> None:
    """Do something to the file of block 0."""
    whole, elsewhere = path.read_bytes(), folder.path.parent / "elsewhere"
    if harm in ("cut", "grow", "empty"):
        path.write_bytes({"cut": whole[:-1], "grow": whole + b"\0", "empty": b""}[harm])
    elif harm == "renamed":  # the rows of other tokens
        write(folder, 99)
        file(folder, 99).rename(path)
    elif harm == "moved":  # the rows of another model
        folder.write(name(0, 1), list(CODEC.encode(planes(5))))
        (folder.path / name(0, 1).space.hex() / path.parent.name / path.name).rename(path)
    elif harm == "versions":  # a block of another form, with digests that fit
        folder._drop(name(0))
        assert folder.write(name(0), [b"three", b"of", b"them"])
    else:
        elsewhere.write_bytes(whole)
        path.unlink()
        if harm == "link":
            path.symlink_to(elsewhere)
        elif harm == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()


@pytest.mark.parametrize("harm", ["cut", "grow", "empty", "renamed", "moved", "versions", "link", "pipe", "directory"])
def test_damaged_and_foreign_files_are_misses(tmp_path: Path, harm: str) -> None:
    folder = BlockFolder(tmp_path / "kv", ROOM)
    assert write(folder, 0)
    harmed(folder, harm, file(folder, 0))
    assert not read(folder, 0) and name(0) not in folder
    assert folder.counts.refused == (harm != "link")
    assert write(folder, 50) and read(folder, 50), "the folder is as good as before"
    folder.close()


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    folder, chance = BlockFolder(tmp_path / "kv", ROOM), random.Random(7)
    for number in range(30):
        assert write(folder, number)
        path = file(folder, number)
        whole = bytearray(path.read_bytes())
        at = number * HEADER // 20 if number < 20 else chance.randrange(HEADER, len(whole))
        whole[at] ^= 1 << chance.randrange(8)
        path.write_bytes(whole)
        assert not read(folder, number), at
    assert folder.counts.refused == 30 and not folder.held
    folder.close()


def test_the_bound_is_kept_and_the_least_recently_used_leave(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path / "kv", 4 * FILE)
    for number in range(4):
        write(folder, number)
    folder.use([name(0), name(1)])  # of these two, 1 holds the later rows
    assert write(folder, 4) and write(folder, 5) and folder.held == 4 * FILE and folder.counts.evicted == 2
    assert [number for number in range(6) if name(number) in folder] == [0, 1, 4, 5]
    folder.use([name(0), name(1), name(4), name(5)])
    folder.close()
    again = BlockFolder(tmp_path / "kv", 2 * FILE)  # a smaller bound, and the order is known from the files
    assert [number for number in range(6) if name(number) in again] == [0, 1]
    assert sum(each.is_file() for each in (tmp_path / "kv" / name(0).space.hex()).rglob("*")) == 2
    assert not BlockFolder(tmp_path / "small", FILE - 1).write(name(1), list(CODEC.encode(planes(1))))
    again.close()


def test_what_was_being_written_is_removed(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path / "kv", ROOM)
    folder.close()
    left = folder.path / PARTS / "17"
    left.write_bytes(b"half a block")
    BlockFolder(tmp_path / "kv", ROOM).close()
    assert not left.exists()


def test_a_full_disk_costs_blocks_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real = BlockFolder(tmp_path / "kv", ROOM), os.write
    assert write(folder, 1)

    def full(descriptor: int, data: memoryview) -> int:
        if len(data) < LAYOUT.bytes:
            return real(descriptor, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert not write(folder, 2) and folder.counts.write_errors == 1 and folder.held == FILE
    assert not list((folder.path / PARTS).iterdir())
    monkeypatch.undo()
    assert write(folder, 2) and read(folder, 1) and read(folder, 2)
    folder.close()


def test_folders_that_cannot_be_ours_are_refused_by_name(tmp_path: Path) -> None:
    def refused(path: Path, why: str) -> None:
        with pytest.raises(UserError, match=why) as raised:
            BlockFolder(path, ROOM)
        assert str(path) in str(raised.value)

    folder = BlockFolder(tmp_path / "kv", ROOM)
    refused(tmp_path / "kv", "in use by another server")
    folder.close()
    BlockFolder(tmp_path / "kv", ROOM).close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("no copy of this exists")
    refused(tmp_path / "mine", "holds other files")
    (tmp_path / "kv" / MARK).write_text("KV blocks of phasewise, form 9\n")
    refused(tmp_path / "kv", "another version")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    refused(tmp_path / "open", "others may write there")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "give a folder that can be written to")


def keep_writing(path: str) -> None:
    """Write blocks until killed: over and over, within a bound, so that some are removed as well."""
    folder = BlockFolder(Path(path), 40 * FILE)
    print("open", flush=True)
    number = 0
    while True:
        write(folder, number % 60)
        number += 1


def test_killed_at_any_moment_it_opens_and_nothing_wrong_is_served(tmp_path: Path) -> None:
    """Eight processes die while they write; each time the next one finds whole blocks."""
    chance, found = random.Random(3), 0
    for _ in range(8):
        writer = Forked(keep_writing, str(tmp_path / "kv"))
        assert writer.stdout.readline() == "open\n"
        time.sleep(chance.uniform(0.002, 0.03))
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate(timeout=30)
        folder = BlockFolder(tmp_path / "kv", ROOM)
        there = [number for number in range(60) if name(number) in folder]
        assert all(read(folder, number) for number in there) and not folder.counts.refused
        assert folder.held == len(there) * FILE <= 41 * FILE
        found += len(there)
        if there:  # and a torn block, as a machine that loses its power leaves it
            path = file(folder, there[0])
            path.write_bytes(path.read_bytes()[: HEADER + 100])
            assert not read(folder, there[0])
        folder.close()
    assert found > 8
