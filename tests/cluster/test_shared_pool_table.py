"""One budget for several: never exceeded, lent without a copy, and taken back from whoever died."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import count
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError

import pytest
import torch

from phasewise.builder import Builder
from phasewise.cluster.pool import ROWS, Account, AccountTable
from phasewise.cluster.shared_pool import SharedPool
from phasewise.cluster.transfer_buffer import Lost, folder, sweep
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv.cache import KV
from phasewise.kv.format import KVShape, Raw
from phasewise.kv.layer_kv import LayerKV
from phasewise.options import parse
from phasewise.request.counters import Counters
from tests import tiny
from tests.seeds import draw

LIMIT = 1 << 20
SHAPE = KVShape(2, 16, torch.float32)
LAYERS = 3
fork = multiprocessing.get_context("fork")


@pytest.fixture
def run() -> Iterator[str]:
    name = f"phasewise.{os.getpid()}.{secrets.token_hex(4)}"
    yield name
    sweep(name)


@pytest.fixture(params=["here", "shared"])
def pool(request: pytest.FixtureRequest, run: str) -> SharedPool:
    return SharedPool.here(LIMIT) if request.param == "here" else SharedPool.create(run, LIMIT)


def left(run: str) -> list[str]:
    """What lies in shared memory besides the table."""
    return [path.name for path in folder().glob(f"{run}*") if not path.name.endswith(".pool")]


# ---- accounts
def test_what_one_sets_aside_the_other_cannot_have(pool: SharedPool) -> None:
    ours, theirs = pool.account("a", False), pool.account("b", False)
    assert ours.room(LIMIT - 100) and not theirs.room(101) and theirs.room(100)
    assert pool.table.used == pool.table.peak == LIMIT
    ours.add(50)
    ours.settle()
    assert (ours.used, ours.free, ours.others, theirs.others) == (50, LIMIT - 150, 100, 50)
    theirs.settle()
    assert theirs.room(LIMIT - 50) and not theirs.room(LIMIT - 49)


def test_room_is_set_aside_once_and_again_when_it_was_used(pool: SharedPool) -> None:
    account = pool.account("a", False)
    assert account.room(70) and account.room(70) and pool.table.used == 70
    account.add(70)
    assert account.room(30) and pool.table.used == 100
    account.add(-70)
    assert account.room(100) and pool.table.used == 100, "what was freed in this step can be had again"


def test_those_that_yield_leave_what_others_wish_for(pool: SharedPool) -> None:
    senior, junior = pool.account("decode", False), pool.account("prefill", True)
    assert junior.room(LIMIT - 100)
    junior.add(LIMIT - 100)
    senior.settle(300)
    assert (senior.claimed, senior.wish, pool.table.wishes) == (100, 200, 200)
    junior.add(-150)
    junior.settle()
    assert junior.free == 0 and not junior.room(1)
    senior.settle(300)
    assert (senior.claimed, senior.wish) == (250, 50)
    junior.add(-100)
    junior.settle()
    senior.settle(300)
    assert senior.wish == 0 and junior.free == 50 and junior.room(50) and not junior.room(51)


def test_loans_count_once_whoever_has_them(pool: SharedPool) -> None:
    ours, theirs = pool.account("a", False), pool.account("b", False)
    kv = filled(ours)
    n = kv.bytes
    ours.settle()
    loan = ours.lend(kv)
    ours.settle()
    assert (ours.used, ours.held, pool.table.used) == (0, n, n)
    theirs.adopt(loan)
    assert (ours.held, theirs.claimed, pool.table.used) == (0, n, n)
    with pytest.raises(LookupError, match="was called in"):
        theirs.adopt(loan)
    theirs.settle()
    assert pool.table.used == 0


def test_a_loan_ends_once(pool: SharedPool) -> None:
    ours, theirs = pool.account("a", False), pool.account("b", False)
    loan = ours.lend(filled(ours))
    pool.drop(loan)
    pool.drop(loan)
    with pytest.raises(LookupError):
        theirs.adopt(loan)
    ours.settle()
    assert pool.table.used == 0


def test_the_dead_leave_nothing_but_what_is_kept(pool: SharedPool) -> None:
    ours, theirs = pool.account("a", False), pool.account("b", False)
    kept, lost = ours.lend(filled(ours)), ours.lend(filled(ours))
    n = filled(ours).bytes
    ours.settle(1000)
    pool.clear("a", [kept])
    assert pool.table.used == n
    kv = adopted(theirs, kept)
    assert kv.bytes == n and pool.table.used == n
    with pytest.raises((LookupError, Lost)):
        adopted(theirs, lost)
    kv.close()
    theirs.settle()
    assert pool.table.used == 0


def test_a_full_table_says_so() -> None:
    table = AccountTable.here(LIMIT)
    row = table.enter("a")
    for _ in range(ROWS - 1):
        table.lend(row, "a", 0)
    with pytest.raises(OSError, match="table is full"):
        table.lend(row, "a", 0)


def test_a_pool_that_shared_memory_cannot_hold_is_refused(run: str) -> None:
    with pytest.raises(UserError, match="lower --kv-bytes"):
        SharedPool.create(run, 1 << 60)
    assert not list(folder().glob(f"{run}*"))


# ---- memory
def filled(account: Account, rows: int = 70) -> KV:
    """A KV with random rows."""
    counters = Counters()
    assert account.room(2 * rows * LAYERS * SHAPE.heads * 2 * SHAPE.dim * 4)
    kv = KV([LayerKV(SHAPE, Raw(), account, 128) for _ in range(LAYERS)], counters)
    for layer in kv.layers:
        layer.append(torch.rand(SHAPE.heads, rows, SHAPE.dim), torch.rand(SHAPE.heads, rows, SHAPE.dim), range(rows))
    kv.commit(rows)
    return kv


def adopted(account: Account, loan: dict, dump: list | None = None) -> KV:
    kv = KV([LayerKV(SHAPE, Raw(), account, 0) for _ in range(LAYERS)], Counters())
    pieces = [
        {"heads": None, "positions": None, "planes": [], "lent": [name, SHAPE.heads, 128, 70, 0], "last": True}
        for name in loan["names"]
    ]
    account.adopt(loan)
    try:
        kv.load(dump or pieces)
    except Exception:
        kv.close()
        raise
    return kv


def rows_of(kv: KV) -> list[torch.Tensor]:
    return [plane.clone() for layer in kv.layers for part in layer.read() for plane in part.planes]


def test_a_kv_changes_hands_without_a_copy(pool: SharedPool) -> None:
    ours, theirs = pool.account("a", False), pool.account("b", False)
    kv = filled(ours)
    before, planes = rows_of(kv), [plane for layer in kv.layers for plane in layer.slabs[0].buffer.planes]
    dump = kv.dump(lent=True)
    loan = ours.lend(kv)
    there = adopted(theirs, loan, dump)
    assert all(torch.equal(a, b) for a, b in zip(rows_of(there), before))
    assert there.counters.kv_bytes_moved == kv.counters.kv_bytes_moved == 0
    planes[0][0, 0, 0] = 42.0  # nobody writes there any more; but this is the same memory
    assert rows_of(there)[0][0, 0, 0] == 42.0
    there.close()


def test_files_bear_the_name_of_whom_they_belong_to(run: str) -> None:
    pool = SharedPool.create(run, LIMIT)
    ours, theirs = pool.account("a", False), pool.account("b", False)
    kv = filled(ours)
    assert sorted(left(run)) == sorted(kv.names) and all(".a." in name for name in kv.names)
    loan = ours.lend(kv)
    there = adopted(theirs, loan)
    assert sorted(left(run)) == sorted(there.names) and all(".b." in name for name in there.names)
    there.close()
    assert not left(run)


def test_what_is_gone_in_part_is_given_back_whole(run: str) -> None:
    pool = SharedPool.create(run, LIMIT)
    ours, theirs = pool.account("a", False), pool.account("b", False)
    loan = ours.lend(filled(ours))
    ours.settle()
    pool.memory.free(loan["names"][-1])
    with pytest.raises(Lost):
        adopted(theirs, loan)
    theirs.settle()
    assert pool.table.used == 0 and not left(run)


# ---- several processes
def _contender(run: str, name: str, seconds: float) -> None:
    """Take and give back as fast as it goes, reading slowly; exit status 1 if the budget was ever exceeded."""
    read = AccountTable.used.fget

    def slowly(table: AccountTable) -> int:
        used: int = read(table)
        time.sleep(0.0003)
        return used

    AccountTable.used = property(slowly)
    account, end = SharedPool.join(run, name).account(name, False), time.monotonic() + seconds
    while time.monotonic() < end:
        if account.room(LIMIT // 3):
            account.add(LIMIT // 3)
            if account.table.used > LIMIT:
                os._exit(1)
        else:
            account.add(-account.used)
            account.settle()
    account.add(-account.used)
    account.settle()
    os._exit(0)


def test_a_budget_holds_between_processes(run: str) -> None:
    pool = SharedPool.create(run, LIMIT)
    workers = [fork.Process(target=_contender, args=(run, str(i), 0.5)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert pool.table.used == 0 and LIMIT // 3 * 3 <= pool.table.peak <= LIMIT


def _reader(run: str, name: str, locked: bool, met: Barrier) -> None:
    """Ask for two thirds of the budget, between reading what is used and taking it waiting for another to read too."""
    read = AccountTable.used.fget
    pool = SharedPool.join(run, name)
    account = pool.account(name, False)
    if not locked:
        pool.table.lock = nullcontext()

    def together(table: AccountTable) -> int:
        used: int = read(table)
        with suppress(BrokenBarrierError):  # under the lock nobody else can come
            met.wait()
        return used

    AccountTable.used = property(together)
    account.room(LIMIT * 2 // 3)
    os._exit(0)


@pytest.mark.parametrize("locked", [True, False])
def test_the_lock_is_what_holds_it(run: str, locked: bool) -> None:
    pool, met = SharedPool.create(run, LIMIT), fork.Barrier(2, timeout=0.2 if locked else 60.0)
    workers = [fork.Process(target=_reader, args=(run, str(i), locked, met)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert pool.table.used == (1 if locked else 2) * (LIMIT * 2 // 3)


def _trader(run: str, ready: Path) -> None:
    """Lend to itself under another name, over and over."""
    pool = SharedPool.join(run, "a")
    ours, theirs = pool.account("a", False), pool.account("b", False)
    for i in count():
        loan = ours.lend(filled(ours))
        there = adopted(theirs, loan)
        theirs.settle()
        ours.settle()
        there.close()
        if i == 1:
            ready.touch()


@pytest.mark.parametrize("seconds", [draw(__name__, i).uniform(0.0, 0.02) for i in range(2)])
def test_killed_at_any_moment_it_leaves_nothing_behind(run: str, tmp_path: Path, seconds: float) -> None:
    pool = SharedPool.create(run, LIMIT)
    worker = fork.Process(target=_trader, args=(run, tmp_path / "ready"))
    worker.start()
    while not (tmp_path / "ready").exists():
        assert worker.is_alive()
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    pool.clear("a", [])
    pool.clear("b", [])
    assert pool.table.used == 0 and not left(run)
    assert pool.account("c", False).room(LIMIT), "the lock is free"


def test_engines_with_accounts_keep_to_the_budget_together() -> None:
    """Two engines that know nothing of each other, in turns, over a pool that has not room for both."""
    pool = SharedPool.here(6 * 64 * tiny.engine().store.row_bytes)
    builder = Builder(tiny.model(), parse({}), Limits(kv_bytes=pool.table.limit, prefix_cache=False), load=tiny.load)
    engines = [builder.engine(("prefill", "decode"), 1.0, pool.account(str(i), False)) for i in range(2)]
    prompts = tiny.prompts(60, 70, 80, 20)
    want = tiny.outs(tiny.run(tiny.engine(prefix_cache=False), prompts, tiny.greedy(30)))
    requests = [tiny.Request(p, tiny.greedy(30)) for p in prompts]
    for i, request in enumerate(requests):
        engines[i % 2].add(request)
    for _ in range(500):
        for engine in engines:
            engine.step()
            engine.store.ledger.settle()
            assert pool.table.used <= pool.table.limit
    assert tiny.outs(requests) == want and pool.table.used == 0
