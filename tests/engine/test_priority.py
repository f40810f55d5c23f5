"""Who goes first: the smaller priority among those that wait, and the last to make way for others."""

from __future__ import annotations

from phasewise.engine.invariants import check
from phasewise.request.params import BACKGROUND, Params
from phasewise.request.request import Request
from tests import oracle, tiny

ROW = tiny.engine().store.row_bytes


def asked(prompt: list[int], priority: int, new: int = 4) -> Request:
    return Request(prompt, Params(max_tokens=new, ignore_eos=True, priority=priority))


def test_those_that_wait_are_taken_by_priority_and_then_as_they_came() -> None:
    engine = tiny.engine(max_running=1)
    requests = [asked([5 + i, 6], priority) for i, priority in enumerate((0, 3, 0, -2, 3, 0))]
    ended: list[Request] = []
    for request in requests:
        engine.add(request)
    while len(ended) < len(requests):
        engine.step()
        check(engine)
        ended += [request for request in requests if request.left is not None and request not in ended]
    assert [requests.index(request) for request in ended] == [3, 0, 2, 5, 1, 4]


def test_the_least_important_makes_way_and_nobody_gets_other_tokens() -> None:
    """Room for two of three: the one that came first is the one that goes."""
    engine = tiny.engine(kv_bytes=5 * 64 * ROW)
    requests = [asked([7 + i] * 40, priority, new=60) for i, priority in enumerate((5, 0, 0))]
    waited: set[int] = set()
    for request in requests:
        engine.add(request)
    for _ in range(1000):
        if all(request.left is not None for request in requests):
            break
        engine.step()
        check(engine)
        waited |= {i for i, request in enumerate(requests) if request in engine.waiting and request.n_out}
    assert waited == {0}
    for request in requests:
        assert request.out == oracle.greedy(tiny.checkpoint(), request.tokens[:40], 60)[0]


def test_the_background_stands_still_while_others_are_there_and_gives_up_its_slot() -> None:
    engine = tiny.engine(max_running=2)
    behind = asked([5, 6, 7], BACKGROUND, new=30)
    first, second = asked([8, 9], 0, new=12), asked([10, 11], 0, new=12)
    engine.add(behind)
    while behind.n_out < 3:
        engine.step()
    engine.add(first)
    for _ in range(4):
        engine.step()
        check(engine)
    assert (behind.n_out, first.n_out) == (3, 4) and behind in engine.running
    engine.add(second)  # both slots are taken, one of them by whom nobody waits for
    engine.step()
    check(engine)
    assert engine.running == [first, second] and second.n_out == 1
    while behind.left is None:
        assert behind.n_out == 3 or (first.left is not None and second.left is not None)
        engine.step()
        check(engine)
    for request, prompt in ((behind, 3), (first, 2), (second, 2)):
        assert request.out == oracle.greedy(tiny.checkpoint(), request.tokens[:prompt], request.n_out)[0]
