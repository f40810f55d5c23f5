"""Weights of few bits: the native kernels against what the format's own package expands their blocks to."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from phasewise.ops import levels as plain
from phasewise.ops import native
from phasewise.ops.native import weights
from phasewise.ops.native.levels import KINDS
from phasewise.ops.native.weights import PackedWeights, pack_blocks
from tests.ops.targets import EACH, HERE

ROWS = ["bfloat16", "int8"]  # forms that they come in
OUTPUTS = 131  # two panels, and some of a third
HALF_AT = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}  # float16; others at 0
WIDE = ("Q4_K", "Q5_K", "Q6_K")
NEW = [kind for kind in KINDS if kind.startswith(("INT4", "E4M3", "CODES", "NM_"))]  # that are no file's


@pytest.fixture(params=EACH, autouse=True)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = native.load(request.param)
    assert kernels is not None
    native._share_threads(kernels)
    monkeypatch.setattr(weights, "library", lambda: kernels)
    torch.manual_seed(0)
    return str(request.param)


def test_sizes_are_the_packages() -> None:
    for name, kind in KINDS.items():
        if name not in NEW:
            assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.inputs, kind.size)


def expand(kind: str, raw: np.ndarray) -> Tensor:
    """Blocks uint8 [out, blocks, bytes] -> float32 [out, in]."""
    if kind not in NEW:
        found = gguf.quants.dequantize(raw.reshape(len(raw), -1), gguf.GGMLQuantizationType[kind])
        return torch.from_numpy(np.asarray(found, dtype=np.float32).reshape(len(raw), -1))
    if kind.startswith("NM_"):
        return expand_sparse(kind, raw)
    if kind.startswith("E4M3"):
        levels = torch.from_numpy(raw[:, :, 4:].copy()).view(torch.float8_e4m3fn).float()
        return (torch.from_numpy(raw[:, :, :4].copy().view(np.float32)) * levels).reshape(len(raw), -1)
    scales, nibbles = raw[:, :, :2].copy().view(np.float16).astype(np.float32), raw[:, :, -KINDS[kind].inputs // 2 :]
    zeros = raw[:, :, 2:3].astype(np.float32) if kind.endswith("ZEROS") else np.float32(8)
    levels = np.stack((nibbles & 15, nibbles >> 4), 3).reshape(*raw.shape[:2], -1)
    return torch.from_numpy((scales * (levels - zeros)).reshape(len(raw), -1))


def some_codes(kind: str, scale: float | None) -> tuple[Tensor, Tensor]:
    """The same of levels whose values stand in a codebook: another for each panel, which begins each of its rows."""
    of = KINDS[kind]
    random = np.random.default_rng(of.size)
    raw = random.integers(0, 256, (OUTPUTS, 640 // of.inputs, of.size), dtype=np.uint8)
    drawn = random.uniform(0.001, 0.01, raw.shape[:2]) if scale is None else np.full(raw.shape[:2], scale)
    raw[:, :, :2] = drawn.astype(np.float16)[..., None].view(np.uint8)
    values = random.uniform(-9, 9, (-(-OUTPUTS // 64), of.codebook))
    values = values if scale is None else values.round()
    books = torch.from_numpy(values).bfloat16()[torch.arange(OUTPUTS) // 64]  # [out, values]
    bits = np.unpackbits(raw[:, :, 2:], axis=2, bitorder="little").reshape(OUTPUTS, 640, -1)
    levels = (bits.astype(np.int64) << np.arange(bits.shape[2])).sum(2)
    scales = torch.from_numpy(raw[:, :, :2].copy().view(np.float16).astype(np.float32))[..., 0]
    weight = books.float().gather(1, torch.from_numpy(levels)) * scales.repeat_interleave(of.inputs, 1)
    starts = books.view(torch.uint8)
    return torch.cat((starts, torch.from_numpy(raw.reshape(OUTPUTS, -1))), 1), weight


def expand_sparse(kind: str, raw: np.ndarray) -> Tensor:
    """Blocks of an N:M kind uint8 [out, blocks, bytes] -> float32 [out, in], value by value."""
    n, m = map(int, kind.split("_")[1:])
    bits = 2 if m == 4 and n == 1 else 4
    groups = 64 // m
    found = torch.zeros(*raw.shape[:2], groups, m)
    values = torch.from_numpy(raw[:, :, -groups * n * 2 :].copy()).view(torch.bfloat16).float()
    for row, block, group in np.ndindex(*raw.shape[:2], groups):
        code = int(raw[row, block, group * bits // 8]) >> group * bits % 8 & (1 << bits) - 1
        places = [code % m] if n == 1 else [i for i in range(4) if code >> i & 1]
        for i, place in enumerate(places):
            found[row, block, group, place] = values[row, block, group * n + i]
    return found.reshape(len(raw), -1)


def layer_of(kind: str, rows: str, raw: Tensor, bias: Tensor | None = None) -> PackedWeights:
    return PackedWeights.of([pack_blocks(raw.numpy(), f"{kind}/{rows}")], bias)


def some_blocks(kind: str, scale: float | None) -> tuple[Tensor, Tensor]:
    """Random blocks uint8 [out, bytes of a row] and what they stand for; every float16 is `scale`, or any of a size."""
    if KINDS[kind].codebook:
        return some_codes(kind, scale)
    values, size, *_ = KINDS[kind]
    random = np.random.default_rng(size)
    raw = random.integers(0, 256, (OUTPUTS, (768 if kind in WIDE else 640) // values, size), dtype=np.uint8)
    for at in () if kind.startswith(("E4M3", "NM_")) else HALF_AT.get(kind, (0,)):
        drawn = random.uniform(0.001, 0.01, raw.shape[:2]) if scale is None else np.full(raw.shape[:2], scale)
        raw[:, :, at : at + 2] = drawn.astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        raw[:, :, 0] = random.integers(120, 130, raw.shape[:2]) if scale is None else 128
    if kind == "NVFP4":
        raw[:, :, :4] = random.integers(0, 90, (*raw.shape[:2], 4)) if scale is None else 64
    if kind.endswith("ZEROS"):
        raw[:, :, 2] &= 15
    if kind.startswith("E4M3"):
        drawn = random.uniform(0.001, 0.01, raw.shape[:2]) if scale is None else np.full(raw.shape[:2], scale)
        raw[:, :, :4] = drawn.astype(np.float32)[..., None].view(np.uint8)
        raw[:, :, 4:][raw[:, :, 4:] & 127 == 127] = 0  # no number
        if scale is not None:
            whole = torch.arange(-16, 16).float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            raw[:, :, 4:] = whole[raw[:, :, 4:] & 31]
    if kind.startswith("NM_"):
        n, m = map(int, kind.split("_")[1:])
        values, size = raw[:, :, -64 // m * n * 2 :], (*raw.shape[:2], 64 // m * n)
        drawn = random.standard_normal(size) * 0.02 if scale is None else random.integers(-16, 17, size)
        values[:] = torch.from_numpy(drawn).bfloat16().view(torch.uint8).numpy()
        if kind == "NM_2_4":
            masks, codes = np.array([3, 5, 6, 9, 10, 12], np.uint8), raw[:, :, :8]  # of four two
            codes[:] = masks[codes % 6] | masks[codes // 6 % 6] << 4
    return torch.from_numpy(raw.reshape(OUTPUTS, -1)), expand(kind, raw)


def bits(y: Tensor) -> Tensor:
    return y.view(torch.int32)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_sums(kind: str, rows: str) -> None:
    """Whole numbers, of which a row's largest in each group is 127: nothing is rounded, whatever the order."""
    raw, weight = some_blocks(kind, 1.0)
    x = torch.randint(-127, 128, (9, weight.shape[1])).float()
    x[:, ::32] = 127
    want = x.double() @ weight.double().T
    assert want.abs().max() < 2**24
    bias, add = torch.randint(-99, 99, (OUTPUTS,)).float(), torch.randint(-99, 99, (9, OUTPUTS)).float()
    layer = layer_of(kind, rows, raw, bias)
    assert torch.equal(layer(x, add), (want + bias + add).float())
    assert torch.equal(layer(x[:2]), (want[:2] + bias).float())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_their_own_and_equal_the_twin(kind: str, rows: str) -> None:
    """Bit for bit in steps of any size, by any threads, and beside rows that hold what is no number."""
    raw, weight = some_blocks(kind, None)
    layer, threads = layer_of(kind, rows, raw), torch.get_num_threads()
    x = torch.randn(513, weight.shape[1])
    x[7, 5], x[200, -1] = torch.inf, torch.nan
    x[8, :64], x[9, :32] = 0, 1e-38
    together = layer(x)
    assert not together[[7, 200]].isfinite().any()
    for size in (1, 2, 3, 4, 5, 6, 7, 9, 64):
        few = x[: 12 * size]
        apart = torch.cat([layer(some) for some in few.split(size)])
        assert torch.equal(apart.view(torch.int32), together[: len(few)].view(torch.int32)), size
    fine = torch.ones(513, dtype=torch.bool)
    fine[[7, 200]] = False
    as_bytes = rows == "int8" and KINDS[kind].whole
    want = plain.multiply(x[fine], weight, KINDS[kind].group, as_bytes=as_bytes)
    assert ((together[fine].double() - want).abs() <= 1e-5 * (x[fine].abs() @ weight.abs().T) + 1e-6).all()
    halves = x.bfloat16()
    assert torch.equal(layer(halves)[fine], layer(halves.float())[fine].bfloat16())
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert torch.equal(layer(x)[fine], together[fine]), "threads change bits"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].whole])
def test_rows_of_bytes_are_alike_on_the_matrix_unit(kind: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of bytes are exact within a group, and take one order over groups: the kernels for AVX-512 give the same."""
    if target != "amx" or "avx512" not in HERE:
        pytest.skip("for processors with a matrix unit")
    raw, weight = some_blocks(kind, None)
    x, other = torch.randn(300, weight.shape[1]), native.load("avx512")
    on_unit = layer_of(kind, "int8", raw)
    monkeypatch.setattr(weights, "library", lambda: other)
    without = layer_of(kind, "int8", raw)
    for rows in (7, 8, 17, 300):
        assert torch.equal(bits(on_unit(x[:rows])), bits(without(x[:rows]))), rows


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_weight(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the format's package, to the bit; packed in slices, from rows that lie apart, in another order."""
    raw, weight = some_blocks(kind, None)
    layer = layer_of(kind, "int8", raw)
    panels = -(-OUTPUTS // 64)
    assert layer.nbytes == raw.nbytes - (OUTPUTS - panels) * KINDS[kind].start  # a panel keeps one codebook
    assert torch.equal(layer.dense(), weight.bfloat16())
    monkeypatch.setattr(weights, "SLICE", 1)
    done: list[tuple[int, int]] = []
    # rows of a panel have its codebook in common, and stay in it
    sizes = (64, 64, 3) if KINDS[kind].codebook else (OUTPUTS,)
    moved = [torch.randperm(size) + at for size, at in zip(sizes, (0, 64, 128))]
    apart, order = torch.cat((raw, raw), 1).numpy()[:, : raw.shape[1]], torch.cat(moved).numpy()
    for places in (None, order):
        sliced = pack_blocks(apart, f"{kind}/bfloat16", places, lambda *rows: done.append(rows))
        wanted = weight if places is None else weight[places]
        assert torch.equal(PackedWeights.of([sliced], None).dense(), wanted.bfloat16())
    assert done == 2 * [(0, 64), (64, 128), (128, 131)]


def test_parts_of_unlike_kinds() -> None:
    """A layer of such parts gives what each of them gives, to the bit."""
    blocks = {kind: some_blocks(kind, None)[0] for kind in ("Q4_K", "Q6_K")}
    parts = [pack_blocks(raw.numpy(), f"{kind}/{rows}") for kind, raw in blocks.items() for rows in ROWS]
    x = torch.randn(70, parts[0].inputs)
    want = torch.cat([PackedWeights.of([part], None)(x) for part in parts], 1)
    assert torch.equal(PackedWeights.of(parts, None)(x), want)


@pytest.mark.parametrize("rows", ROWS)
def test_a_number_that_all_blocks_are_multiplied_with(rows: str) -> None:
    """Of one part alone; sums are taken before it, so that a power of two changes no other bit. Rows of the weight
    too."""
    raw, weight = some_blocks("NVFP4", None)
    parts = [pack_blocks(raw.numpy(), f"NVFP4/{rows}", whole=whole) for whole in (None, 2.0**-7, 3.0)]
    layer, plainly = PackedWeights.of(parts, None), layer_of("NVFP4", rows, raw)
    for x in (torch.randn(1, weight.shape[1]), torch.randn(70, weight.shape[1])):
        y = plainly(x)
        assert torch.equal(layer(x), torch.cat((y, y * 2.0**-7, y * 3.0), 1))
    assert torch.equal(layer.dense(), torch.cat((weight, weight * 2.0**-7, weight * 3.0)).bfloat16())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].codebook])
def test_a_panel_has_one_codebook(kind: str) -> None:
    """Each value of it is found by its level, a row of unlike ones is refused, and NaN would spoil its panel alone."""
    of = KINDS[kind]
    raw, weight = some_blocks(kind, None)
    with pytest.raises(ValueError, match="rows 64 to 127 make a panel and have unlike codebooks"):
        pack_blocks(np.concatenate((raw[:64], raw[-1:], raw[64:])), f"{kind}/bfloat16")
    books = raw[:, : of.start].contiguous().view(torch.bfloat16)
    assert len(books.unique(dim=0)) == 3 and len(weight[0, : of.inputs].unique()) == of.codebook
    assert torch.equal(layer_of(kind, "bfloat16", raw)(torch.eye(640)), weight.T)
    spoilt = raw.clone()
    spoilt[64:128, : of.start] = torch.full((64, of.codebook), torch.nan).bfloat16().view(torch.uint8)
    found = layer_of(kind, "bfloat16", spoilt)(torch.ones(9, 640)).isnan()
    assert found[:, 64:128].all() and not found[:, :64].any() and not found[:, 128:].any()


@pytest.mark.parametrize("kind", ["E4M3_32", "E4M3_128"])
def test_every_float_of_eight_bits(kind: str) -> None:
    """Each has its value, those below the smallest normal number too; one that is no number spoils its output alone."""
    values, size, *_ = KINDS[kind]
    raw = np.zeros((OUTPUTS, 256 // values, size), dtype=np.uint8)
    raw[:, :, :4] = np.array([1], np.float32).view(np.uint8)
    raw[1::2, :, 4:] = np.arange(256, dtype=np.uint8).reshape(-1, values)
    raw[:, :, 4:][raw[:, :, 4:] & 127 == 127] = 1
    weight = expand(kind, raw)
    layer = layer_of(kind, "bfloat16", torch.from_numpy(raw.reshape(OUTPUTS, -1)))
    assert torch.equal(layer.dense(), weight.bfloat16())
    assert torch.equal(layer(torch.eye(256)), weight.T)
    raw[4, 0, 9] = 255
    spoiled = layer_of(kind, "bfloat16", torch.from_numpy(raw.reshape(OUTPUTS, -1)))(torch.ones(9, 256))
    assert spoiled[:, 4].isnan().all() and spoiled[:, :4].isfinite().all() and spoiled[:, 5:].isfinite().all()
