"""What an actor is told comes in order, and nothing waits for bytes that belong to somebody else."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from queue import Empty
from typing import Any

import pytest

from phasewise.cluster.command_queue import LATE, CommandQueue

Message = dict[str, Any]


class Network:
    """A transfer buffer whose parcels are here when we say so."""

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        self.started: set[str] = set()
        self.news = threading.Condition()

    def here(self, parcels: Sequence[Any], seconds: float) -> bool:
        with self.news:
            self.started |= {parcel["name"] for parcel in parcels}
            return self.news.wait_for(lambda: any(p["name"] in self.arrived for p in parcels), seconds)

    def deliver(self, name: str) -> None:
        with self.news:
            self.arrived.add(name)
            self.news.notify_all()


def read(mail: CommandQueue, n: int) -> list[Message]:
    """The next n commands, and no more than these."""
    commands = [mail.ready.get(timeout=10.0) for _ in range(n)]
    with pytest.raises(Empty):
        mail.ready.get_nowait()
    assert None not in commands
    return commands  # type: ignore[return-value]


def test_commands_come_in_order_whatever_order_they_arrive_in() -> None:
    mail = CommandQueue(Network())
    told: list[Message] = [{"do": "add", "n": i} for i in range(100)]
    numbered = list(enumerate(told))
    random.Random(0).shuffle(numbered)

    def tell(part: list[tuple[int, Message]]) -> None:
        for number, command in part:
            mail.put(number, command)

    threads = [threading.Thread(target=tell, args=(numbered[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(mail, 100) == told


def test_a_parcel_on_its_way_holds_up_its_own_request_only() -> None:
    network = Network()
    mail = CommandQueue(network)
    told: list[Message] = [
        {"do": "piece", "id": "a", "parcel": {"name": "a0"}},
        {"do": "piece", "id": "a", "parcel": {"name": "a1"}},
        {"do": "take", "id": "b", "parcel": {"name": "b0"}},
        {"do": "cancel", "id": "a"},
        {"do": "cancel", "id": "c"},
        {"do": "renew", "ids": ["a", "b"]},
    ]
    for number, command in enumerate(told):
        mail.put(number, command)
    assert read(mail, 2) == told[4:]
    assert network.started >= {"a0", "a1", "b0"}, "all are fetched at once"
    network.deliver("b0")
    assert read(mail, 1) == [told[2]]
    network.deliver("a1")
    time.sleep(0.3)
    assert read(mail, 0) == []
    network.deliver("a0")
    assert read(mail, 3) == [told[0], told[1], told[3]]
    mail.put(len(told), told[0])
    assert read(mail, 1) == [told[0]], "what is here does not wait"


def test_a_lost_command_is_noticed() -> None:
    mail = CommandQueue(Network())
    assert not mail.lost(0, 0.0) and not mail.lost(0, 100.0)
    mail.put(0, {"do": "add"})
    mail.put(2, {"do": "add"})
    assert not mail.lost(3, 200.0) and not mail.lost(3, 200.0 + LATE)
    assert mail.lost(3, 200.1 + LATE)
    mail.put(1, {"do": "add"})
    assert not mail.lost(3, 300.0)
    assert not mail.lost(4, 400.0), "it may still be on its way"
    mail.put(3, {"do": "add"})
    assert not mail.lost(5, 500.0), "and the next one has its own time"
    assert mail.lost(5, 500.1 + LATE)
