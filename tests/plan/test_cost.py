"""Costs of steps, held against closed forms; device files, each number with its unit and source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.errors import UserError
from phasewise.load import config_of
from phasewise.plan.cost import StepWork, counts
from phasewise.plan.device import UNITS, device, names, read
from phasewise.plan.roofline import Roofline
from phasewise.plan.shape import DecoderShape

SMALL = DecoderShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=1000)
OPT_13B = DecoderShape(
    40, 5120, 40, 40, 128, 2 * 5 * 4096 // 3, 50272
)  # its two MLP matrices have 4 * 5120 columns each
LLAMA_8B = DecoderShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)


def prompt(rows: int, before: int = 0, emits: int = 1) -> StepWork:
    """A slice of a prompt whose first `before` rows are there."""
    return StepWork(rows, before * rows + rows * (rows + 1) / 2, before + rows, emits=emits)


def decode(batch: int, context: int) -> StepWork:
    return StepWork(decode_rows=batch, context=batch * context, emits=batch)


def test_weights_and_rows_are_counted_as_they_are() -> None:
    per_layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128  # q, k and v, o, MLP
    assert SMALL.weight_bytes == 2 * (2 * per_layer + 64 * 1000)
    assert SMALL.row_bytes == 2 * 2 * 2 * 16 * 2
    assert LLAMA_8B.row_bytes == 131072  # 128 KiB per token, as is well known of it


def test_a_shape_is_read_from_a_model() -> None:
    config = config_of("pocket")
    shape = DecoderShape.of(config)
    assert (shape.layers, shape.hidden, shape.vocab) == (config.layers, config.hidden, config.vocab)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_a_prompts_work_is_the_same_however_it_is_cut_but_for_what_is_read_again(chunk: int) -> None:
    whole = counts(prompt(512), SMALL)
    steps = [prompt(min(chunk, 512 - at), at, emits=int(at + chunk >= 512)) for at in range(0, 512, chunk)]
    parts = [counts(step, SMALL) for step in steps]
    assert sum(part.flops for part in parts) == pytest.approx(whole.flops)
    assert sum(part.kv_written_bytes for part in parts) == whole.kv_written_bytes == 512 * SMALL.row_bytes
    if 512 % chunk == 0:  # Sarathi-Serve: c * N * (N + 1) / 2 rows are read
        n = 512 // chunk
        assert sum(part.kv_read_bytes for part in parts) == chunk * n * (n + 1) / 2 * SMALL.row_bytes
    body = sum(part.weight_bytes for part in parts) - SMALL.head_weights * SMALL.width
    assert body == len(parts) * (whole.weight_bytes - SMALL.head_weights * SMALL.width)


def test_layers_of_a_step_add_up() -> None:
    step = prompt(100)
    half = replace(step, emits=0, share=0.5)
    last = replace(step, share=0.5)
    both = [counts(half, SMALL), counts(last, SMALL)]
    assert tuple(map(sum, zip(*both))) == pytest.approx(counts(step, SMALL))


def test_experts_are_read_once_for_all_rows_that_choose_them() -> None:
    mixture = replace(SMALL, experts=8, chosen=2)
    assert mixture.touched(1) == pytest.approx(2)
    assert mixture.touched(10_000) == pytest.approx(8)
    one, many = counts(decode(1, 10), mixture), counts(decode(10_000, 10), mixture)
    assert many.weight_bytes == pytest.approx(mixture.weight_bytes)
    assert one.weight_bytes < many.weight_bytes
    assert many.flops == pytest.approx(10_000 * one.flops)


@pytest.mark.parametrize("name", names())
def test_long_contexts_cost_bytes_over_bandwidth(name: str) -> None:
    made = Roofline(device(name), SMALL)
    rate = made.device.kv_bandwidth or made.device.bandwidth * made.device.bandwidth_share
    more = made.seconds(decode(1, 2_000_000)) - made.seconds(decode(1, 1_000_000))
    arithmetic = 4 * SMALL.layers * SMALL.heads * SMALL.head_dim * 1e6 / made.device.flops / made.device.flops_share
    assert more == pytest.approx(max(1e6 * SMALL.row_bytes / rate, arithmetic))


def test_distserves_fits_are_met_on_the_device_they_were_made_on() -> None:
    """OPT-13B on an A100, milliseconds: 0.10191 per prompt token, 6.27e-4 per row of context, 19.93 of weights."""
    made = Roofline(device("a100"), OPT_13B)
    per_token = (made.seconds(prompt(4096, emits=0)) - made.seconds(prompt(2048, emits=0))) / 2048
    assert per_token * 1e3 == pytest.approx(0.10191, rel=0.1)
    per_row = (made.seconds(decode(8, 2048)) - made.seconds(decode(8, 1024))) / 8 / 1024
    assert per_row * 1e3 == pytest.approx(6.27e-4, rel=0.02)
    assert made.seconds(decode(1, 1)) * 1e3 == pytest.approx(19.93, rel=0.05)


def test_several_devices_share_the_work_and_exchange_rows() -> None:
    one, four = Roofline(device("h100"), LLAMA_8B), Roofline(device("h100"), LLAMA_8B, 4)
    step = prompt(4096)
    sums = 2 * 32 * (2 * 3 / 4 * 4096 * 4096 * 2 / 450e9 + 1e-5)
    assert four.seconds(step) == pytest.approx(one.seconds(step) / 4 + sums, rel=0.01)
    assert four.kv_bytes == pytest.approx(4 * 80e9 - LLAMA_8B.weight_bytes, rel=0.01)


def test_joules_and_money_follow_the_time() -> None:
    made = Roofline(device("a100"), LLAMA_8B)
    busy, idle = made.price(prompt(4096)), made.price(decode(1, 10))
    assert busy.joules == pytest.approx(400 * busy.seconds, rel=0.01)  # arithmetic all the time
    assert 60 + 170 <= idle.joules / idle.seconds < 0.6 * 400  # memory all the time: half of what is above idle
    assert busy.money == pytest.approx(2.2 / 3600 * busy.seconds)
    assert Roofline(device("l4"), LLAMA_8B).price(decode(1, 1)).money == 0.0  # no price is known


def test_an_npu_pads_its_last_chunk() -> None:
    made = Roofline(device("mllm-npu"), SMALL)
    assert made.seconds(StepWork(1)) == made.seconds(StepWork(256))
    assert made.seconds(StepWork(257)) == made.seconds(StepWork(512)) > 1.9 * made.seconds(StepWork(256))
    assert made.seconds(decode(1, 1)) < made.seconds(prompt(1, emits=0))


def test_every_device_says_where_its_numbers_are_from() -> None:
    assert names() == ["a100", "h100", "h100-350w", "h200", "instinfer", "l4", "mi300x", "mllm-npu", "pim-gpt"]
    for name in names():
        for what, number in device(name).numbers.items():
            assert number.unit == UNITS[what][0]
            assert len(number.source or number.why or "") > 5, (name, what)
    assert device("H100").numbers["power"].source and device("h100").numbers["flops_share"].inferred


WHOLE = """name = "x"
[flops]
value = 1e12
unit = "FLOP/s"
source = "y data sheet"
[bandwidth]
value = 1e11
unit = "B/s"
source = "y data sheet"
[memory]
value = 1e10
unit = "B"
inferred = "a guess"
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[memory]", "[memroy]"), "unknown number 'memroy'. Did you mean memory"),
        (('unit = "B/s"', 'unit = "GB/s"'), "bandwidth: the unit is 'GB/s', but it must be 'B/s'"),
        (("value = 1e12", "value = -1"), "flops: value=-1 is not a number of at least 0"),
        (("value = 1e12", "value = 0"), "flops: value=0 FLOP/s would make every step endless"),
        (('inferred = "a guess"', ""), "memory needs a source, or else a word on how it was inferred"),
        (('name = "x"', ""), "lacks name"),
        (('name = "x"', "name = "), "is not TOML"),
        (("[flops]", "[flops_share]\nvalue = 2\nunit = '1'\ninferred = 'z'\n[flops]"), "flops_share=2 must be at most"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(WHOLE)
    assert read(path).flops == 1e12 and device(str(path)).numbers["memory"].inferred
    path.write_text(WHOLE.replace(*change))
    with pytest.raises(UserError) as caught:
        read(path)
    assert words in str(caught.value)


def test_devices_that_are_not_there_and_models_that_do_not_fit() -> None:
    with pytest.raises(UserError, match=r"unknown device 'h1000'. Did you mean h100"):
        device("h1000")
    with pytest.raises(UserError, match="cannot be read"):
        device("nowhere/x.toml")
    large = replace(LLAMA_8B, layers=320)
    with pytest.raises(UserError, match=r"the weights take 140.* GB on each of 1 H100 SXM.*at least 2"):
        Roofline(device("h100"), large)
    with pytest.raises(UserError, match="ways=3 does not divide"):
        Roofline(device("h100"), LLAMA_8B, 3)
