"""Admission by targets, under a clock that tests turn, and over HTTP: what is taken is in time, others hear at once."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest

from phasewise.serve.failures import ApiError
from phasewise.serve.guard.slo_admission import SLOAdmission
from tests.serve.running import Server

SERVICE, TARGET, SECONDS = 0.1, 2.0, 300.0


@dataclass
class One:
    """`token`: when its first token comes, which nobody knows before."""

    arrived: float
    clock: Clock
    token: float = 0.0
    over: bool = False
    size: int = 1

    @property
    def first_token(self) -> float | None:
        return self.token if self.token <= self.clock.now else None


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def offered(
    load: float, servers: int = 1, seconds: float = 300.0, seed: int = 0
) -> tuple[list[float], int, list[float]]:
    """Times to the first token of those taken, how many were refused, and what these were told to wait, at so many
    times the capacity of `servers` that take SERVICE seconds on average, each for one request at a time."""
    rng, clock = random.Random(seed), Clock()
    punctual = SLOAdmission(clock)
    free, waits, refused, retries = [0.0] * servers, list[float](), 0, list[float]()
    while clock.now < SECONDS:
        clock.now += rng.expovariate(load * servers / SERVICE)
        try:
            punctual.admit(TARGET)
        except ApiError as error:
            refused += 1
            retries.append(error.retry)
            assert (error.status, error.code) == (429, "too_late")
            continue
        began = max(clock.now, heapq.heappop(free))
        one = One(clock.now, clock, began + SERVICE * rng.uniform(0.5, 1.5))
        heapq.heappush(free, one.token)
        punctual.took(one)
        waits.append(one.token - clock.now)
    return sorted(waits), refused, retries


@pytest.mark.parametrize("servers", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_at_three_times_capacity_what_is_taken_is_in_time(servers: int, seed: int) -> None:
    waits, refused, retries = offered(3.0, servers, seed=seed)
    assert waits[int(0.99 * len(waits))] <= TARGET
    capacity = SECONDS * servers / SERVICE
    assert len(waits) > 0.9 * capacity, "as much is served as can be"
    assert refused > 1.5 * capacity and all(wait > 0 for wait in retries)


def test_below_capacity_nobody_is_refused() -> None:
    waits, refused, _ = offered(0.7)
    assert refused < 0.005 * len(waits)


def test_without_targets_nobody_is_refused_and_a_lone_one_never() -> None:
    clock = Clock()
    punctual = SLOAdmission(clock)
    for at in range(50):
        clock.now = float(at)
        punctual.admit(None)
        punctual.took(One(clock.now, clock, token=1000.0))
    clock.now = 1001.0
    punctual.admit(0.001)  # nobody is ahead: all have their token, however long it took
    punctual.took(One(clock.now, clock, token=3000.0))
    with pytest.raises(ApiError, match="1 requests are ahead"):
        punctual.admit(0.001)


def test_who_leaves_without_a_token_is_ahead_of_nobody() -> None:
    clock = Clock()
    punctual = SLOAdmission(clock)
    first = One(0.0, clock, token=5.0)
    punctual.took(first)
    clock.now = 5.0
    gone = One(5.0, clock, token=1e9)
    punctual.admit(1.0)
    punctual.took(gone)
    with pytest.raises(ApiError):
        punctual.admit(1.0)
    gone.over = True
    punctual.admit(1.0)


def test_over_http_with_the_time_to_come_back() -> None:
    ask = {"prompt": "the quick brown fox", "max_tokens": 400, "ignore_eos": True}
    with Server(refuse_late=True, limits={"max_running": 1}, faults={"pause": 0.005}) as server:
        assert server.post("/v1/completions", {**ask, "max_tokens": 1}).status_code == 200  # something is known of it
        client = server.client()
        streams = [client.completions.create(model="tiny", prompt="the", max_tokens=2000, stream=True,
                                             extra_body={"ignore_eos": True}) for _ in range(2)]  # fmt: skip
        next(iter(streams[0]))
        late = server.post("/v1/completions", {**ask, "slo": {"ttft_ms": 0.001}})
        assert late.status_code == 429 and late.json()["error"]["code"] == "too_late"
        assert int(late.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        server.settled()
        assert server.post("/v1/completions", {**ask, "max_tokens": 1}).status_code == 200


def test_what_is_not_taken_after_all_is_ahead_of_nobody() -> None:
    clock = Clock(5.0)
    punctual = SLOAdmission(clock)
    punctual.took(One(0.0, clock, token=5.0))
    with pytest.raises(KeyError), punctual.admitted(One(5.0, clock, token=1e9), 1.0):
        with pytest.raises(ApiError):
            punctual.admit(1.0)  # it counts while it is handed over
        raise KeyError
    punctual.admit(1.0)
