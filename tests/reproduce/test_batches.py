"""Larger batches within a fixed budget: how many requests decode at once, and which rounds count."""

from __future__ import annotations

import pytest

from phasewise.bench.fitting import FullBatch
from phasewise.reproduce import batches
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.system import Setting


def test_a_saver_of_half_the_bytes_fits_more_and_dense_fits_what_the_budget_holds() -> None:
    with Lab.open(Scale(quick=True)) as lab:
        (found,) = batches.beside(lab, Setting({"store": "int8"}), 1)
        assert found["dense"].most == batches.DENSE
        assert found["method"].most > 1.5 * batches.DENSE
        assert all(each.tokens_per_s and each.preemptions == 0 for each in found.values())
        outcome = batches.larger(lab, Setting({"store": "int8"}), 1.5)
        assert outcome.passed and outcome.measured.startswith(f"{found['method'].most} against {batches.DENSE} ")
        assert not batches.larger(lab, Setting(), 1.5).passed


def test_throughput_is_paired_by_round_and_rounds_without_both_are_left_out() -> None:
    dense = FullBatch(4, 0, 1.0)  # 4 tokens a second
    rounds = [
        {"method": FullBatch(8, 0, 1.0), "dense": dense},
        {"method": FullBatch(8, 0, None), "dense": dense},
        {"method": FullBatch(8, 0, 0.5), "dense": dense},
    ]
    gain = batches.throughput(rounds)
    assert gain is not None and gain.n == 2
    assert (gain.low, gain.high) == (pytest.approx(2), pytest.approx(4))
    assert batches.throughput(rounds[1:2]) is None
