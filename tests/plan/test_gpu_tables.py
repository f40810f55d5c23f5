"""Costs from measured tables. What the tables themselves say is tested where the extra `plan` is installed (`make
silicon`); without it those tests are skipped, and a double stands for them elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from phasewise.cli import main
from phasewise.errors import UserError
from phasewise.plan.cost import StepWork
from phasewise.plan.gpu_tables import BITS, Place, TableCost, described, rounded, slices_of, table_cost
from phasewise.plan.setting import known
from phasewise.plan.shape import DecoderShape

from .test_cost import LLAMA_8B, decode, prompt

SHAPES = Path(__file__).parents[2] / "scripts" / "shapes"
MIXTURE = DecoderShape(48, 2048, 32, 4, 128, 768, 151936, experts=128, chosen=8)  # Qwen3-30B-A3B
H100 = Place("h100_sxm", "trtllm")
measured = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="measured tables are not installed: make silicon"
)


class Plain:
    """Tables in closed form, which count how often they are asked."""

    kv_tokens = 1000

    def __init__(self) -> None:
        self.asked: Counter[tuple[object, ...]] = Counter()

    def rest(self, rows: int, prompts: bool) -> float:
        self.asked["rest", rows, prompts] += 1
        return 1.0 + rows * 1e-3 + (0.5 if prompts else 0.0)

    def read(self, slices: int, rows: int, before: int) -> float:
        self.asked["read", slices, rows, before] += 1
        return slices * rows * (before + (rows + 1) / 2) * 1e-6

    def write(self, requests: int, context: int) -> float:
        self.asked["write", requests, context] += 1
        return requests * context * 1e-6


def test_a_step_is_the_work_on_its_rows_and_the_attention_of_both_kinds() -> None:
    cost = TableCost(Plain(), LLAMA_8B)
    assert cost.seconds(decode(4, 32)) == pytest.approx(1.004 + 4 * 32e-6)
    assert cost.seconds(prompt(32)) == pytest.approx(1.532 + 32 * 33 / 2 * 1e-6)
    both = StepWork(32, 32 * 33 / 2, 32, 4, 128, emits=5)
    assert cost.seconds(both) == pytest.approx(1.536 + 32 * 33 / 2 * 1e-6 + 4 * 32e-6)
    assert cost.seconds(StepWork()) == 0.0
    half = StepWork(32, 32 * 33 / 2, 32, share=0.5)
    assert cost.seconds(half) == pytest.approx(cost.seconds(prompt(32)) / 2)


def test_money_is_of_all_devices_and_energy_is_said_to_be_unknown() -> None:
    price = TableCost(Plain(), LLAMA_8B, ways=4, hourly=3.6).price(decode(1, 10))
    assert price.money == pytest.approx(price.seconds * 4e-3)
    assert price.joules == 0.0
    assert TableCost(Plain(), LLAMA_8B).kv_bytes == 1000 * LLAMA_8B.row_bytes


@pytest.mark.parametrize(
    ("slices", "rows", "before"), [(1, 512, 0), (1, 512, 1536), (7, 100, 0), (3, 64, 128), (5, 1, 9)]
)
def test_equal_slices_are_found_again_from_their_sums(slices: int, rows: int, before: int) -> None:
    pairs = slices * (before * rows + rows * (rows + 1) / 2)
    assert slices_of(StepWork(slices * rows, pairs, slices * (before + rows))) == pytest.approx((slices, rows, before))


def test_parts_of_a_row_and_unequal_slices_have_a_price() -> None:
    cost = TableCost(Plain(), LLAMA_8B)
    part = StepWork(prefill_rows=100 * 0.3, pairs=5050 * 0.3, prefixes=30)  # type: ignore[arg-type]
    assert 0 < cost.seconds(part) < cost.seconds(prompt(100))
    long, short = prompt(400), prompt(100)
    unequal = StepWork(500, long.pairs + short.pairs, 500)
    rest = 1.5 + 500e-3
    assert cost.seconds(unequal) - rest == pytest.approx((long.pairs + short.pairs) * 1e-6, rel=0.01)


def test_contexts_are_rounded_by_a_part_that_is_known_and_asked_for_once() -> None:
    assert all(abs(rounded(n) - n) <= n / 2**BITS for n in range(20_000))
    assert all(a <= b for a, b in pairwise(map(rounded, range(20_000))))
    tables = Plain()
    cost = TableCost(tables, LLAMA_8B)
    for context in range(1000, 2000):
        cost.seconds(decode(8, context))
    assert set(tables.asked.values()) == {1}
    assert len(tables.asked) <= 2 + 2**BITS


@pytest.mark.parametrize("text", ["h100_sxm", "h100_sxm/", "/trtllm", "a/b/c/d", ""])
def test_a_place_says_what_it_must_say(text: str) -> None:
    with pytest.raises(UserError, match=r"write aiconfigurator:SYSTEM/BACKEND or .* such as aiconfigurator:h100_sxm"):
        Place.parse(f"aiconfigurator:{text}")


def test_a_place_is_read_and_written_alike() -> None:
    for text in ("aiconfigurator:h100_sxm/trtllm", "aiconfigurator:b200_sxm/vllm/0.24.0"):
        assert str(Place.parse(text)) == text


def test_without_the_package_an_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(UserError, match=r"h100_sxm/trtllm needs measured tables.*pip install 'phasewise\[plan\]'"):
        known({"": str(H100)}, 1, LLAMA_8B)


def test_other_devices_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    assert known({"": "h100"}, 1, LLAMA_8B).cost("all", None).seconds(decode(1, 1)) > 0


# ---- the tables
@measured
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("h10_sxm/trtllm", r"unknown system 'h10_sxm'. Did you mean .*h100_sxm"),
        ("h100_sxm/trtlm", r"unknown backend 'trtlm'. Did you mean trtllm"),
        ("h100_sxm/vllm/0.25.0", r"unknown version '0.25.0'. Did you mean 0.2[47].0"),
        ("b60/trtllm", r"nothing was measured on b60 under trtllm"),
    ],
)
def test_what_was_not_measured_is_named_with_what_is_near(place: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        table_cost(Place.parse(f"aiconfigurator:{place}"), LLAMA_8B, 1)


@measured
def test_a_model_that_does_not_fit_or_was_not_covered_is_refused() -> None:
    large = DecoderShape(80, 8192, 64, 8, 128, 28672, 128256)
    with pytest.raises(UserError, match=r"ways=1: this model has no price there: no KV budget.*Try other ways"):
        table_cost(H100, large, 1)
    with pytest.raises(UserError, match="16-bit weights and KV, not of 8 and 16 bits"):
        table_cost(H100, DecoderShape(32, 4096, 32, 8, 128, 14336, 128256, width=1.0), 1)
    with pytest.raises(UserError, match="this model has no price there"):
        table_cost(H100, LLAMA_8B, 5)


@measured
@pytest.mark.parametrize(
    ("shape", "name"), [(LLAMA_8B, "meta-llama/Meta-Llama-3.1-8B"), (MIXTURE, "Qwen/Qwen3-30B-A3B")]
)
@pytest.mark.parametrize("ways", [1, 2, 4])
def test_steps_cost_what_the_package_says_of_the_model_by_its_name(shape: DecoderShape, name: str, ways: int) -> None:
    from aiconfigurator_core.sdk.engine import EngineHandle

    split = {"moe_tp_size": ways} if shape.experts else {}
    theirs = EngineHandle.compile(name, "h100_sxm", "trtllm", tp_size=ways, **split)
    cost = table_cost(H100, shape, ways)
    for rows in (64, 1000, 4096):
        assert 1e3 * cost.seconds(prompt(rows)) == pytest.approx(theirs.predict_prefill_latency(1, rows), rel=1e-6)
        # a slice after others: the same attention, of rows whose number is rounded
        after = theirs.predict_prefill_latency(1, 3 * rows, 2 * rows)
        assert 1e3 * cost.seconds(prompt(rows, 2 * rows)) == pytest.approx(after, rel=0.01)
    for batch in (1, 32, 256):
        for context in (100, 1001, 5003):
            direct = theirs.decode_step_latency(batch, context, 2)
            assert 1e3 * cost.seconds(decode(batch, context)) == pytest.approx(direct, rel=0.02)
            both = StepWork(512, 512 * 513 / 2, 512, batch, batch * context, emits=batch + 1)
            mixed = sum(theirs.mixed_step_breakdown(512, batch, 512, 2)[1:3])
            attention = direct - sum(ms for at, ms, *_ in theirs.decode_step_per_op(batch, context, 2)
                                     if not at.endswith("_attention"))  # fmt: skip
            assert 1e3 * cost.seconds(both) == pytest.approx(mixed + attention, rel=0.01)


@measured
@pytest.mark.parametrize("shape", [LLAMA_8B, MIXTURE])
def test_prices_are_positive_and_rise_with_rows_and_contexts(shape: DecoderShape) -> None:
    """Kernels for more rows may be the faster ones: measured steps dip, by less than a part in ten."""
    for ways in (1, 2):
        cost = table_cost(H100, shape, ways)
        series = [
            [cost.seconds(prompt(rows)) for rows in (1, 16, 64, 256, 1024, 4096)],
            [cost.seconds(decode(batch, 1000)) for batch in (1, 4, 16, 64, 256)],
            [cost.seconds(decode(32, context)) for context in (10, 100, 1000, 10_000)],
            [cost.seconds(prompt(256, before)) for before in (0, 1024, 8192)],
            [cost.seconds(StepWork(rows, rows * (rows + 1) / 2, rows, 32, 32_000)) for rows in (1, 64, 512, 2048)],
        ]
        for values in series:
            assert values[0] > 0
            assert all(b > 0.9 * a for a, b in pairwise(values)), values
            assert values[-1] > 1.05 * values[0]


@measured
def test_more_devices_are_faster_hold_more_and_cost_more() -> None:
    costs = [table_cost(H100, LLAMA_8B, ways) for ways in (1, 2, 4)]
    times = [cost.seconds(decode(64, 1000)) for cost in costs]
    assert times[0] > times[1] > times[2]
    assert [cost.kv_bytes for cost in costs] == sorted(cost.kv_bytes for cost in costs)
    money = [cost.price(decode(64, 1000)).money for cost in costs]
    assert 0 < money[0] < money[1] < money[2]


@measured
def test_a_shape_describes_the_model_that_it_was_read_from() -> None:
    from phasewise.load import config_of

    for name in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"):
        shape = DecoderShape.of(config_of(str(SHAPES / name)))
        assert described(shape)["num_hidden_layers"] == shape.layers
        assert table_cost(H100, shape, 4).seconds(decode(1, 100)) > 0


@measured
def test_the_simulator_takes_measured_devices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["simulate", "--device", f"prefill={H100},decode=h100", "--model", str(SHAPES / "llama-3.1-8b"),
              "--place", "disaggregated", "--workload", "fixed:prompt=500,new=20", "--requests", "50", "--rate", "5",
              "--ttft", "500", "--tpot", "30"])  # fmt: skip
    said = capsys.readouterr()
    assert not done.value.code, said.err
    assert "within the targets: 100.0%" in said.out
    assert "money: " in said.out
    assert "joules" not in said.out  # half of the workers' is unknown
