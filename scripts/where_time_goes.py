"""Where the time of a plain decode step goes: linear layers, attention, the rest of the layers, the head, all else.

    python scripts/where_time_goes.py --model DIR [--dtype bfloat16] [--batch 1,8,16] [--prompt 192] [--steps 60]

The native calls of real steps are timed where they are made: all else is the rest of those steps. After as many more
steps, the linear layers and the attention of the layers' one call are run again by themselves, each in native calls of
its own, on the same weights and the same KV; what remains are norms, rotations, activations and waiting for one
another. Prints a Markdown table, medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phasewise.bench.drive import Bench
from phasewise.engine.limits import Limits
from phasewise.model.mlp import MLP
from phasewise.model.model import Model
from phasewise.ops.native import library
from phasewise.ops.native.spans import Few, attend
from phasewise.ops.native.weights import PackedWeights
from phasewise.request.params import Params
from phasewise.request.request import Request

HEADS = ("batch", "step ms", "all layers", "products alone", "attention alone", "head", "all else", "tokens/s")


class Timed:
    """A native call that these objects make by an attribute of their own, and the seconds spent in it."""

    def __init__(self, objects: Sequence[Any], name: str) -> None:
        self.objects, self.name, self.run, self.seconds = objects, name, getattr(objects[0], name), 0.0

    def __enter__(self) -> Timed:
        for each in self.objects:
            setattr(each, self.name, self)
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.objects:
            setattr(each, self.name, self.run)

    def __call__(self, address: int) -> Any:
        start = time.perf_counter()
        result = self.run(address)
        self.seconds += time.perf_counter() - start
        return result

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def linears(model: Model) -> list[PackedWeights]:
    """The linear layers of one step, the head left out."""
    found = []
    for layer in model.layers:
        assert isinstance(layer.mlp, MLP)
        found += [layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down]
    return [linear.native for linear in found if linear.native is not None]


def attention(model: Model, requests: list[Request]) -> None:
    """The attention of one step over the requests' KV as it is now."""
    config = model.config
    q = torch.randn(1, config.heads, config.head_dim).to(model.dtype)
    for i in range(config.layers):
        kv = [request.kv.layers[i].slabs[0] for request in requests if request.kv is not None]
        spans = [Few(q, *(plane[:, : slab.n] for plane in slab.buffer.planes)) for slab in kv]
        attend(spans, config.head_dim**-0.5)


@torch.inference_mode()
def measure(bench: Bench, batch: int, prompt: int, steps: int) -> list[float]:
    """Seconds of a step, and of its parts in the order of HEADS."""
    model = bench.model
    engine = bench.engine({}, Limits(None, batch, prefix_cache=False))
    params = Params(max_tokens=2 * steps + 8, ignore_eos=True)
    rng = random.Random(batch)
    requests = [Request([rng.randrange(3, model.config.vocab) for _ in range(prompt)], params) for _ in range(batch)]
    for request in requests:
        engine.add(request)
    while min(request.n_out for request in requests) < 4:
        engine.step()
    whole, alone = [], []
    with Timed([model.stack], "_run") as layers, Timed([model.whole_head], "_run") as head:
        for _ in range(steps):
            seconds, inside, top = timed(engine.step), layers.take(), head.take()
            whole.append((seconds, inside, top, seconds - inside - top))
    calls = linears(model)
    rows = {call.inputs: torch.randn(batch, call.inputs).to(model.dtype) for call in calls}
    with Timed(calls, "_multiply") as products, Timed([library()], "attend") as reading:
        for _ in range(steps):
            engine.step()
            attention(model, requests)
            for call in calls:
                call(rows[call.inputs])
            alone.append((products.take(), reading.take()))
    step, inside, top, rest = (statistics.median(column) for column in zip(*whole))
    return [step, inside, *(statistics.median(column) for column in zip(*alone)), top, rest]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", default="1,8,16")
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    bench = Bench.load(args.model, args.dtype)
    if bench.model.stack is None or bench.model.whole_head is None:
        parser.error(f"{args.model} as {args.dtype} does not run in the native step: there is nothing to take apart")
    print(f"| {' | '.join(HEADS)} |\n|{'---:|' * len(HEADS)}")
    for batch in map(int, args.batch.split(",")):
        step, *parts = measure(bench, batch, args.prompt, args.steps)
        cells = [f"{part * 1e3:.2f} ({part / step:.0%})" for part in parts]
        print(f"| {batch} | {step * 1e3:.2f} | {' | '.join(cells)} | {batch / step:.0f} |", flush=True)


if __name__ == "__main__":
    main()
