"""Random numbers depend on (seed, position, purpose, index) and on nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from phasewise.verbs import sample as sampling
from phasewise.verbs.sample import Purpose, uniform
from tests.lazy import lazy

stats: Any = lazy("scipy.stats")


def philox(left: int, right: int, key: int) -> tuple[int, int]:
    """Philox 2x64 with ten rounds, written out once more (Salmon et al., 2011)."""
    for _ in range(10):
        high, low = divmod(left * 0xD2B74407B1CE6E93, 2**64)
        left, right = high ^ key ^ right, low
        key = (key + 0x9E3779B97F4A7C15) % 2**64
    return left, right


# the generator's published test vectors: counter, key -> output
VECTORS = [
    ((0, 0, 0), (0xCA00A0459843D731, 0x66C24222C9A845B5)),
    ((2**64 - 1, 2**64 - 1, 2**64 - 1), (0x65B021D60CD8310F, 0x4D02F3222F86DF20)),
    ((0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0), (0x0A5E742C2997341C, 0xB0F883D38000DE5D)),
]


@pytest.mark.parametrize("given, expected", VECTORS)
def test_the_second_writing_gives_the_published_vectors(given: tuple[int, int, int], expected: tuple[int, int]) -> None:
    assert philox(*given) == expected


@pytest.mark.parametrize(
    "seed, position, purpose, index", [(0, 0, 0, 0), (7, 1000, 2, 3), (2**63, 5, 4, 0), (-1, 1, 1, 1)]
)
def test_uniform_is_philox(seed: int, position: int, purpose: int, index: int) -> None:
    word, _ = philox(position, purpose << 32 | index, seed % 2**64)
    assert uniform(seed, position, purpose, index) == (word >> 11) / 2**53


def test_values_are_pinned() -> None:
    """Changing them changes every seeded generation of every user."""
    assert uniform(0, 0, Purpose.SAMPLE) == pytest.approx(0.7890720529, abs=1e-9)
    assert uniform(42, 17, Purpose.ACCEPT, 2) == pytest.approx(0.0461555276, abs=1e-9)


def test_numbers_lie_in_the_unit_interval() -> None:
    assert (sampling._WORD >> 11) * 2.0**-53 < 1.0


@pytest.mark.parametrize("vary", range(4), ids=["seed", "position", "purpose", "index"])
def test_numbers_are_uniform_and_neighbours_independent(vary: int) -> None:
    def at(i: int) -> float:
        given = [11, 12, 3, 4]
        given[vary] += i
        return uniform(*given)

    values = np.array([at(i) for i in range(20_000)])
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    pairs, _, _ = np.histogram2d(values[:-1:2], values[1::2], bins=10, range=[[0, 1], [0, 1]])
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3


def test_purposes_and_indices_do_not_collide() -> None:
    given = itertools.product(range(3), range(40), Purpose, range(8))
    values = [uniform(*one) for one in given]
    assert len(set(values)) == len(values)
