"""What a key may use, by a clock of numbers."""

from __future__ import annotations

import pytest

from phasewise.serve.failures import ApiError
from phasewise.serve.guard.quota import Bucket, Key, Quota


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(quota: Quota, tokens: int | None = None) -> ApiError:
    before = dict(quota.used), quota.running, quota.tokens and quota.tokens.level
    with pytest.raises(ApiError) as error:
        quota.enter() if tokens is None else quota.reserve(tokens)
    assert (dict(quota.used), quota.running, quota.tokens and quota.tokens.level) == before, "refusals take nothing"
    return error.value


def test_a_bucket_fills_evenly_up_to_a_minutes_worth(clock: Clock) -> None:
    bucket = Bucket(60, clock)
    assert bucket.level == 60 and bucket.full == 0
    bucket.take(60)
    assert (bucket.level, bucket.wait(1), bucket.wait(30), bucket.full) == (0, 1, 30, 60)
    clock.now += 15
    assert bucket.level == 15 and bucket.wait(30) == 15 and bucket.wait(10) == 0
    clock.now += 1000
    assert bucket.level == 60
    bucket.take(-5)
    assert bucket.level == 60
    bucket.take(90)  # a debt
    assert bucket.level == -30 and bucket.wait(1) == 31


def test_requests_per_minute(clock: Clock) -> None:
    quota = Quota(Key("alice", (), requests_per_minute=2), clock)
    for _ in range(2):
        quota.enter()
    error = refused(quota)
    assert (error.status, error.code, error.retry) == (429, "rate_limit_exceeded", 30)
    assert "'alice' may send 2 requests per minute" in str(error) and quota.refused == {"requests": 1}
    clock.now += 30
    quota.enter()
    assert dict(quota.headers()) == {
        b"x-ratelimit-limit-requests": b"2", b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"60.000s",
    }  # fmt: skip
    assert quota.used["requests"] == 3


def test_requests_at_once_need_no_time_but_an_end(clock: Clock) -> None:
    quota = Quota(Key("alice", (), concurrent=2), clock)
    quota.enter(), quota.enter()
    clock.now += 1e6
    assert "has 2 requests under way" in str(refused(quota))
    quota.leave(0, 0, 0)
    quota.enter()
    assert quota.running == 2 and quota.headers() == []


def test_tokens_are_reserved_and_settled(clock: Clock) -> None:
    quota = Quota(Key("alice", (), tokens_per_minute=600), clock)
    assert quota.tokens is not None
    quota.enter()
    quota.reserve(500)
    error = refused(quota, 300)
    assert error.status == 429 and error.retry == 20 and "600 tokens per minute; 300 are asked for" in str(error)
    quota.leave(500, prompt=20, output=80)  # 400 were not needed
    assert quota.tokens.level == 500
    quota.enter()
    quota.reserve(10)
    quota.leave(10, prompt=10, output=990)  # it was not said how many there would be
    assert quota.tokens.level == -500
    assert dict(quota.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    assert refused(quota, 100).retry == 60
    assert quota.used == {"requests": 2, "prompt": 30, "output": 1070}


def test_what_never_fits_is_not_to_be_tried_again(clock: Clock) -> None:
    quota = Quota(Key("alice", (), tokens_per_minute=600), clock)
    error = refused(quota, 601)
    assert (error.status, error.code) == (400, "request_too_large") and "601" in str(error) and "600" in str(error)


def test_other_limits_leave_what_was_used(clock: Clock) -> None:
    quota = Quota(Key("alice", (), requests_per_minute=10, tokens_per_minute=600), clock)
    for _ in range(4):
        quota.enter()
    quota.change(Key("alice", (), requests_per_minute=5))
    assert quota.requests is not None and quota.requests.level == 1 and quota.tokens is None and quota.running == 4
    quota.change(Key("alice", (), requests_per_minute=20, tokens_per_minute=10))
    assert quota.requests.level == 16 and quota.tokens is not None and quota.tokens.level == 10
