"""Kinds of weights of few bits, whose blocks the native kernels take as a file has them and never expand.

A weight is `d * value + m`: consecutive inputs of an output share `d` and `m`, and each has a level of 4 to 8 bits.
`level_kinds.h` says what a block's bytes mean, and how they lie once they are packed. They take as many bytes then.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class BlockRows(Protocol):
    """A weight in blocks, uint8 [out, bytes of a row]: an array, or what makes rows when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, rows: slice | NDArray[np.int64], /) -> NDArray[np.uint8]: ...


class LevelKind(NamedTuple):
    """`inputs` of an output lie in a block of `size` bytes. Rows in int8 have a scale for every `group` inputs; not
    `whole`: levels are no whole numbers, and rows stay in bfloat16. `codebook`: a row of blocks begins with so many
    values in bfloat16, which all rows of a panel have in common."""

    inputs: int
    size: int
    group: int = 32
    whole: bool = True
    codebook: int = 0

    @property
    def start(self) -> int:
        """Bytes of a row before its first block."""
        return 2 * self.codebook


# In the order of levels.cpp. INT4 is what AWQ, GPTQ and compressed-tensors are brought into: float16 d, with ZEROS a
# byte for the level that stands for 0 (else it is 8), and bytes of two inputs each, the earlier in the low nibble.
# E4M3 is what checkpoints in FP8 are brought into: float32 d, and a float of 8 bits (e4m3fn) for each input.
# NM_N_M are N:M sparse matrices in bfloat16: codes of the groups of M, then the kept values (level_sparse.h).
# CODES have a codebook, learned (`model/codebook.py`) or bitsandbytes': float16 d, and levels as a stream of bits, the
# first in the lowest.
KINDS = {
    "Q4_0": LevelKind(32, 18),
    "Q4_1": LevelKind(32, 20),
    "Q5_0": LevelKind(32, 22),
    "Q5_1": LevelKind(32, 24),
    "Q8_0": LevelKind(32, 34),
    "Q4_K": LevelKind(256, 144),
    "Q5_K": LevelKind(256, 176),
    "Q6_K": LevelKind(256, 210),
    "IQ4_NL": LevelKind(32, 18),
    "MXFP4": LevelKind(32, 17),
    "NVFP4": LevelKind(64, 36),
    "INT4_32": LevelKind(32, 18),
    "INT4_64": LevelKind(64, 34, 64),
    "INT4_128": LevelKind(128, 66, 128),
    "INT4_32_ZEROS": LevelKind(32, 19),
    "INT4_64_ZEROS": LevelKind(64, 35, 64),
    "INT4_128_ZEROS": LevelKind(128, 67, 128),
    "E4M3_32": LevelKind(32, 36, whole=False),
    "E4M3_128": LevelKind(128, 132, 128, whole=False),
    **{f"CODES_{bits}_{inputs}": LevelKind(inputs, inputs * bits // 8 + 2, inputs, whole=False, codebook=1 << bits)
       for inputs in (128, 64) for bits in (4, 3, 2)},
    "NM_2_4": LevelKind(64, 72, 64, whole=False),
    "NM_1_4": LevelKind(64, 36, 64, whole=False),
    "NM_1_8": LevelKind(64, 20, 64, whole=False),
}  # fmt: skip

# Each of them is two forms: for rows rounded to bfloat16, where levels are exact too, and to int8.
FORMS = tuple(f"{kind}/{rows}" for kind in KINDS for rows in ("bfloat16", "int8"))
WEIGHT_FORMS = ("bfloat16", "int8", *FORMS)  # of all weights, as kernels.h numbers them
