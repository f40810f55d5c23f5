"""Splitwise's pools on numbers alone: shortest queues in tokens, what overflows where, borrowing and the way home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.cluster.phase_pools import PhasePools, pool
from phasewise.cluster.policy import Pairing


@dataclass(eq=False)
class Bench:
    """A seat with the numbers we say."""

    role: str
    prefilling: int = 0
    decoding: int = 0
    hits: int = 0

    def cached(self, tokens: Sequence[int]) -> int:
        return min(self.hits, len(tokens))


def prompt(n: int) -> list[int]:
    return [7] * n


POOLS = PhasePools(2, 2, threshold=100)


def test_every_worker_can_do_both_and_has_an_equal_share() -> None:
    specs = PhasePools(2, 3, 1).worker_specs()
    assert [spec.role for spec in specs] == ["prompt"] * 2 + ["token"] * 3 + ["mixed"]
    assert all(spec.phases == ("prefill", "decode") and spec.share == 1 / 6 for spec in specs)
    assert isinstance(POOLS, Pairing) and POOLS.push


# ---- prompts
def test_the_shortest_queue_counts_tokens_not_requests() -> None:
    """Ten short prompts are less than one long one."""
    long, short = Bench("prompt", prefilling=80), Bench("prompt", prefilling=10 * 5)
    assert POOLS.start(prompt(20), [long, short]) is short


def test_what_is_cached_does_not_count() -> None:
    cold, warm = Bench("prompt", prefilling=10), Bench("prompt", prefilling=40, hits=64)
    assert POOLS.start(prompt(20), [cold, warm]) is cold  # 30 against 40
    assert POOLS.start(prompt(60), [cold, warm]) is warm  # 70 against 40


def test_an_empty_worker_takes_a_prompt_of_any_length() -> None:
    views = [Bench("prompt"), Bench("token")]
    assert POOLS.start(prompt(5000), views) is views[0]


def test_beyond_the_threshold_prompts_overflow_to_mixed_workers_and_then_to_borrowed_ones() -> None:
    busy, mixed, token, idle = Bench("prompt", 90), Bench("mixed", 50), Bench("token", 0, 900), Bench("token", 0, 40)
    everybody = [busy, mixed, token, idle]
    assert POOLS.start(prompt(10), everybody) is busy  # exactly 100
    assert POOLS.start(prompt(11), everybody) is mixed
    assert POOLS.start(prompt(51), everybody) is idle  # the token worker that decodes least
    idle.prefilling = 51
    assert pool(idle) == "mixed"
    assert POOLS.start(prompt(40), everybody) is mixed  # 90 against 91
    assert POOLS.start(prompt(60), everybody) is token
    token.prefilling = 60
    assert POOLS.start(prompt(70), everybody) is mixed  # all turn it away: the shortest queue


# ---- tokens
def test_tokens_go_to_the_token_worker_that_decodes_least() -> None:
    first, second, start = Bench("token", decoding=500), Bench("token", decoding=200), Bench("prompt", 40)
    assert POOLS.reserve_peer(prompt(9), start, [first, second]) is second
    assert POOLS.go_on(9, [first, second, start]) is second


def test_without_room_at_token_workers_tokens_go_to_mixed_ones_or_stay() -> None:
    start, other = Bench("prompt", 40), Bench("prompt", 10)
    mixed = Bench("mixed", 80, 3000)
    assert POOLS.reserve_peer(prompt(9), start, [start, other, mixed]) is mixed
    assert POOLS.reserve_peer(prompt(9), start, [start, other]) is start  # borrowed for it: nothing has to cross
    assert POOLS.reserve_peer(prompt(9), start, []) is start
    other.decoding = 9
    assert POOLS.reserve_peer(prompt(9), start, [start, other]) is other  # borrowed before


def test_a_mixed_worker_keeps_what_it_has_prefilled_unless_a_token_worker_has_less_to_do() -> None:
    start, token = Bench("mixed", 10, 300), Bench("token", 0, 300)
    assert POOLS.reserve_peer(prompt(9), start, [start, token]) is start
    token.decoding = 299
    assert POOLS.reserve_peer(prompt(9), start, [start, token]) is token
    borrowed = Bench("token", 30, 100)
    assert POOLS.reserve_peer(prompt(9), borrowed, [token]) is borrowed  # it decodes anyway


# ---- borrowed and back
def test_a_borrowed_worker_is_home_when_nothing_foreign_is_left() -> None:
    token, other = Bench("token", 0, 700), Bench("prompt", 100, 0)
    views = [other, token]
    assert POOLS.start(prompt(50), views) is token
    token.prefilling += 50
    assert pool(token) == "mixed" and POOLS.start(prompt(40), views) is token  # the mixed pool, before others
    token.prefilling = 0
    assert pool(token) == "token" and token.decoding == 700  # its own work was there all the time
    lent = Bench("prompt", 0, 60)
    assert pool(lent) == "mixed"
    lent.decoding = 0
    assert pool(lent) == "prompt"
    assert pool(Bench("mixed")) == pool(Bench("mixed", 5, 5)) == "mixed"


work = st.integers(0, 150)
benches = st.lists(st.builds(Bench, st.sampled_from(["prompt", "token", "mixed"]), work, work), min_size=1, max_size=6)


@settings(deadline=None)
@given(benches, st.integers(1, 200))
def test_a_worker_is_borrowed_only_when_all_others_turn_a_prompt_away(views: list[Bench], n: int) -> None:
    def takes(view: Bench) -> bool:
        return not view.prefilling or view.prefilling + n <= POOLS.threshold

    chosen = POOLS.start(prompt(n), views)
    order = ["prompt", "mixed", "token"]
    before = order[: order.index(pool(chosen))]
    assert takes(chosen) or not any(takes(view) for view in views)
    if takes(chosen):
        assert not any(takes(view) for view in views if pool(view) in before)
        mates = [view for view in views if pool(view) == pool(chosen)]
        assert chosen.prefilling == min(view.prefilling for view in mates)
