"""Who does what, on numbers alone: policies, what the router guesses of prefixes, and the life of a move."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from phasewise.child import Message
from phasewise.cluster.handle import BLOCK, REMEMBERED, WorkerHandle
from phasewise.cluster.in_flight import HandoffTransfer
from phasewise.cluster.launcher import WorkerSpec
from phasewise.cluster.policy import TwoPools, least_decoding, least_pending, threads_each
from phasewise.kv.handoff import State
from tests import tiny


@dataclass
class WorkerView:
    role: str = "prefill"
    prefilling: int = 0
    decoding: int = 0
    known: int = 0

    def cached(self, tokens: Any) -> int:
        return min(self.known, len(tokens))


@dataclass
class Line:
    """A line that remembers what was told."""

    name: str = "decode-0"
    alive: bool = True
    told: list[Message] = field(default_factory=list)

    def tell(self, command: Message) -> None:
        self.told.append(command)

    def hear(self) -> list[Message]:
        return []

    def kill(self) -> None:
        self.alive = False


def handle(**state: Any) -> WorkerHandle:
    found = WorkerHandle(Line(), WorkerSpec("decode", ("prefill", "decode"), 0.5), now=0.0)
    found.state = {"heard": 0, "arrivals": [], **state}
    return found


# ---- policies
def test_a_prompt_joins_the_shortest_queue_cached_tokens_aside() -> None:
    busy, idle = WorkerView(prefilling=100), WorkerView(prefilling=60)
    assert least_pending([1] * 50, [busy, idle]) is idle
    busy.known = 45
    assert least_pending([1] * 50, [busy, idle]) is busy
    assert least_pending([1] * 10, [busy, idle]) is idle  # 10 cached tokens are no reason to wait for 100


def test_a_request_goes_on_where_the_least_is_read() -> None:
    views = [WorkerView(decoding=n) for n in (30, 10, 20)]
    assert least_decoding(views) is views[1]


def test_threads_are_shared_out() -> None:
    cores = os.cpu_count() or 1
    assert threads_each(1) == cores and threads_each(10 * cores) == 1


def test_two_pools_share_the_budget() -> None:
    specs = TwoPools(prefill=2, decode=3, share=0.4).worker_specs()
    assert [spec.role for spec in specs] == ["prefill"] * 2 + ["decode"] * 3
    assert sum(spec.share for spec in specs) == pytest.approx(1.0)
    assert specs[0].share == pytest.approx(0.2) and specs[0].phases == ("prefill",)
    assert specs[-1].phases == ("prefill", "decode"), "a decoder must be able to start a request again"


def test_short_prompts_and_all_under_load_start_where_they_decode() -> None:
    prefill, decode = (
        [WorkerView("prefill"), WorkerView("prefill", prefilling=90)],
        [WorkerView("decode", decoding=9), WorkerView("decode")],
    )
    policy = TwoPools(2, 2, 0.5, local=8, queue=50)
    assert policy.start([1] * 9, [*prefill, *decode]) is prefill[0]
    assert policy.start([1] * 8, [*prefill, *decode]) is decode[1]
    decode[0].known = 100
    assert policy.start([1] * 100, [*prefill, *decode]) is decode[0], "all but nothing of it is cached there"
    decode[0].known = 0
    prefill[0].prefilling = 51
    assert policy.start([1] * 100, [*prefill, *decode]) is decode[1]
    prefill[0].prefilling = 50
    assert policy.start([1] * 100, [*prefill, *decode]) is prefill[0]


def test_two_pools_do_with_whoever_is_there() -> None:
    policy = TwoPools(1, 1, 0.5)
    prefill, decode = WorkerView("prefill"), WorkerView("decode")
    assert policy.start([1] * 100, [prefill]) is prefill
    assert policy.start([1] * 100, [decode]) is decode
    assert policy.go_on(100, []) is None
    assert policy.go_on(100, [decode]) is decode


# ---- what the router guesses of prefixes
def test_whole_blocks_of_prompts_are_remembered() -> None:
    (tokens,) = tiny.prompts(3 * BLOCK + 10)
    there = handle()
    assert there.cached(tokens) == 0
    there.remember(tokens)
    assert there.cached(tokens) == 3 * BLOCK
    assert there.cached(tokens[: 2 * BLOCK + 1]) == 2 * BLOCK
    assert there.cached([*tokens[:BLOCK], 5, *tokens[BLOCK + 1 :]]) == BLOCK
    assert there.cached([5, *tokens[1:]]) == 0, "a block is known by all before it"
    there.forget_prefixes()
    assert there.cached(tokens) == 0


def test_the_oldest_blocks_are_forgotten() -> None:
    there = handle()
    first, second = tiny.prompts(BLOCK, BLOCK)
    there.remember(first)
    there.remember(second)
    assert there.cached(first) == BLOCK  # asked for: the younger one now
    there.remember(list(range(3, 3 + (REMEMBERED - 1) * BLOCK)))
    assert (there.cached(first), there.cached(second)) == (BLOCK, 0)


def test_a_worker_is_quiet_once_it_has_heard_everything() -> None:
    there = handle()
    assert there.quiet
    there.tell({"do": "forget"})
    there.tell({"do": "forget"})
    assert [command["n"] for command in there.connection.told] == [1, 2] and not there.quiet
    there.state = {"heard": 2, "arrivals": ["r"]}
    assert not there.quiet
    there.state = {"heard": 2, "arrivals": []}
    assert there.quiet


# ---- a move
OFFER = {"id": "r", "attempt": 3, "packed": {}, "parcel": {"name": "p"}, "room": 100}


def test_a_move_promises_room_until_it_ends() -> None:
    for end in (State.OWNED, State.RELEASED):
        there, move = handle(free=250), HandoffTransfer(deadline=5.0)
        assert move.n_bytes == 0 and move.overdue(5.1) and not move.overdue(5.0)
        move.offer = dict(OFFER)
        assert not move.overdue(99.0), "it waits for room"
        move.send(there, deadline=20.0)
        assert (there.promised, there.coming, there.free, move.state) == (100, 1, 150, State.SENDING)
        assert there.connection.told == [{"do": "take", **OFFER, "n": 1}]
        move.end(end)
        assert (there.promised, there.coming, move.target, move.state) == (0, 0, None, end)


def test_a_move_is_overdue_unless_it_is_known_to_queue() -> None:
    there, move = handle(free=250), HandoffTransfer(offer=dict(OFFER))
    move.send(there, deadline=20.0)
    assert not move.overdue(20.0) and move.overdue(20.1)
    there.state["arrivals"] = ["another"]
    assert move.overdue(20.1) and move.state is State.SENDING
    there.state["arrivals"] = ["another", "r"]
    assert not move.overdue(20.1) and move.state is State.DELIVERED
    there.state["arrivals"] = []
    assert move.overdue(20.1)
