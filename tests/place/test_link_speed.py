"""Who sends learns how fast its link is from who receives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from phasewise.cluster.transfer_buffer import InlineBuffer, Parcel
from phasewise.request.request import Request
from tests import tiny
from tests.place.links import Clock


def test_the_senders_wire_is_told_what_the_transfer_buffer_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    placed = tiny.engine({"place": "disaggregated", "store": "cachegen:level=1"}, clock=clock, prefix_cache=False)
    told: list[tuple[int, float]] = []
    sender, receiver = (handle.connection.worker for handle in placed.handles)
    wire = sender.engine.store.wire
    get = InlineBuffer.get

    def slow(shelf: InlineBuffer, parcel: Parcel) -> list[Tensor]:
        clock.now += 0.25
        return get(shelf, parcel)

    def delivered(n_bytes: int, seconds: float) -> None:
        told.append((n_bytes, seconds))

    monkeypatch.setattr(InlineBuffer, "get", slow)
    monkeypatch.setattr(wire, "delivered", delivered)
    requests = [Request(prompt, tiny.greedy(3)) for prompt in tiny.prompts(40, 90)]
    add(placed, requests)
    assert [seconds for _, seconds in told] == [0.25, 0.25]
    assert sum(n_bytes for n_bytes, _ in told) == sender.engine.counters.kv_bytes_sent
    assert receiver.engine.counters.handoffs == 2


def add(placed: tiny.Placed, requests: Sequence[Request]) -> None:
    for request in requests:
        placed.add(request)
    tiny.finish(placed, requests)
