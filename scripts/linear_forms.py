"""One linear layer in each form of weights, by the number of rows: microseconds of one thread's processor time.

    python scripts/linear_forms.py --kernels avx512 amx --kinds Q4_0 Q4_1 INT4_128 E4M3_128 --outputs 1536 --inputs 1536

Each set of kernels multiplies rows of bfloat16 with several layers in turn, so that the weights do not stay in the
nearest caches; the least of many times counts, and time in which another process has the core does not. "bfloat16" and
"int8" are weights that lie in no blocks. Printed as Markdown. With --from-memory so many layers take turns that none of
them stays in any cache, and the last column compares one row with the most bytes a second that one thread reads here.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from functools import cache, partial

import numpy as np
import torch

from phasewise.bench.bandwidth import StreamedWeight
from phasewise.bench.machine import cpu
from phasewise.ops import native
from phasewise.ops.native import weights
from phasewise.ops.native.levels import KINDS
from phasewise.ops.native.weights import PackedWeights, pack_blocks

LAYERS = 6  # that are multiplied in turn
LARGE = 1 << 29  # bytes that stay in no cache
SECONDS = 0.4  # of each number of rows
BYTE = 0x2C  # of all blocks: levels do not change the time, and scales of every format are ordinary numbers then


@cache
def load(target: str) -> ctypes.CDLL | None:
    return native.load(target)


def layer(form: str, outputs: int, inputs: int) -> PackedWeights:
    kind = form.partition("/")[0]
    if kind not in KINDS:
        return PackedWeights(torch.ones(outputs, inputs, dtype=torch.bfloat16), None, form)
    size = KINDS[kind].start + inputs // KINDS[kind].inputs * KINDS[kind].size
    return PackedWeights.of([pack_blocks(np.full((outputs, size), BYTE, np.uint8), form)], None)


def microseconds(layers: list[PackedWeights], rows: int) -> float:
    x = torch.randn(rows, layers[0].inputs).bfloat16()
    best, end = float("inf"), time.thread_time() + SECONDS
    while time.thread_time() < end:
        began = time.thread_time()
        for each in layers:
            each(x)
        best = min(best, time.thread_time() - began)
    return best / len(layers) * 1e6


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--kernels", nargs="+", default=["avx512", "amx"], choices=native.TARGETS)
    asked.add_argument("--kinds", nargs="+", default=["Q4_0", "Q4_1", "INT4_128", "E4M3_128"], choices=KINDS)
    asked.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 64, 512])
    asked.add_argument("--outputs", type=int, default=1536)
    asked.add_argument("--inputs", type=int, default=1536)
    asked.add_argument("--from-memory", action="store_true", help="more layers than caches hold, beside the read limit")
    args = asked.parse_args()
    torch.set_num_threads(1)
    print(f"{args.outputs} outputs of {args.inputs} inputs; {cpu()}.\n")
    if args.from_memory and 1 not in args.rows:
        raise SystemExit("error: --from-memory compares one row with the read limit: add 1 to --rows")
    limit = StreamedWeight() if args.from_memory else None
    print(
        "| form | kernels |" + "".join(f" {rows} |" for rows in args.rows) + (" of the read limit |" if limit else "")
    )
    print("|---|---|" + "---:|" * (len(args.rows) + bool(limit)))
    whole = [f"{kind}/int8" for kind in args.kinds if KINDS[kind].whole]
    for form in ["bfloat16", *(f"{kind}/bfloat16" for kind in args.kinds), "int8", *whole]:
        for target in args.kernels:
            if load(target) is None:
                raise SystemExit(f"error: kernels for {target} are not built, or this processor does not run them")
            vars(weights)["library"] = partial(load, target)  # what all of them are packed and multiplied by
            layers = [layer(form, args.outputs, args.inputs)]
            size = layers[0].nbytes
            layers += [layer(form, args.outputs, args.inputs) for _ in range(LARGE // size if limit else LAYERS - 1)]
            found = [microseconds(layers, rows) for rows in args.rows]
            cells = [f"{each:,.0f}" for each in found]
            if limit:
                rate = size / found[args.rows.index(1)] * 1e6
                cells.append(f"{rate / limit.rate():.2f}")
            print(f"| {form} | {target} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
