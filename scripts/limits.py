"""What this machine can do at most: bytes read per second, and multiplications per second in bfloat16 and int8.

    python scripts/limits.py [--threads N] [--rounds 7]

Every limit is the best that anything reached here, torch's operators or our own kernels: a floor made from it is one
that nobody has gone below. Prints one JSON line, which `scripts/roofline.py` takes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch

from phasewise.bench.bandwidth import best, reading
from phasewise.bench.machine import cores, describe
from phasewise.ops import native
from phasewise.ops.linear import Linear

SIDE = 2048  # of the square products


def multiplying(rounds: int) -> tuple[float, float]:
    """GFLOP/s in bfloat16, Gop/s in int8."""
    x, weight = torch.randn(SIDE, SIDE).bfloat16(), torch.randn(SIDE, SIDE).bfloat16()
    bytes_ = torch.randint(-127, 128, (SIDE, SIDE), dtype=torch.int8)
    packed = Linear(weight)
    half: list[Callable[[], object]] = [lambda: torch.nn.functional.linear(x, weight), lambda: packed(x)]
    eighth: list[Callable[[], object]] = [lambda: torch._int_mm(bytes_, bytes_)]
    if native.library() is not None:
        rounded = Linear(weight, precision="int8")
        eighth.append(lambda: rounded(x))
    work = 2 * SIDE**3 / 1e9
    return max(work / best(run, rounds) for run in half), max(work / best(run, rounds) for run in eighth)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bfloat16, int8 = multiplying(args.rounds)
    found = {"read_gb_s": reading(args.rounds) / 1e9, "bfloat16_gflop_s": bfloat16, "int8_gop_s": int8}
    print(json.dumps({**{name: round(value, 1) for name, value in found.items()}, "machine": describe()}))


if __name__ == "__main__":
    main()
