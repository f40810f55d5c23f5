"""The peer table: this engine among transformers, llama.cpp, vLLM, OpenVINO GenAI, all on the same prompts.

    python scripts/peers.py --tools DIR all --root ROOT --out FILE --rounds 5 --sizes S M [--only phasewise-bf16 ...]
        [--reps 1] [--few-bits]
    python scripts/peers.py --tools DIR report --out FILE --bw GB/s --gflops GFLOP/s

DIR holds the peers' measuring script, `bench_peers.py`, its `plan.json` and `setup_peers.sh`, which sets the peers up
in ROOT; see docs/results/performance.md. Every contender runs in a process and an environment of its own, one after the
other, and rounds are interleaved. What follows --tools DIR is that script's own command line; this one adds a peer to
it, and leaves out those that are not set up.

With --few-bits they are files and checkpoints of four bits, which peers_few_bits.sh makes. Sizes are S, M, M-all (its
head in four bits too), L, smollm2 and gemma3 then.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

TOOLS = "PEER_TOOLS"  # in the environment of the processes that `all` starts
MOST_RUNNING = 32  # as the others get


def load_tools(folder: str) -> ModuleType:
    """The peers' script as a module which starts this file, not itself, for every contender."""
    path = Path(folder) / "bench_peers.py"
    spec = importlib.util.spec_from_file_location("bench_peers", path)
    if not path.is_file() or spec is None or spec.loader is None:
        sys.exit(f"error: --tools {folder} has no bench_peers.py: give the folder of the peers' scripts")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__file__ = str(Path(__file__).resolve())
    os.environ[TOOLS] = str(Path(folder).resolve())
    return module


def phasewise_of(tools: ModuleType) -> type:
    class Phasewise(tools.Peer):  # type: ignore[misc, name-defined]
        """This engine in the caller's process, stepped by one thread; its prefix cache off."""

        name = "phasewise"

        def version(self) -> str:
            from importlib.metadata import version

            return version("phasewise")

        def load(self) -> None:
            import torch

            from phasewise.bench.drive import Bench
            from phasewise.engine.limits import Limits

            torch.set_num_threads(self.args.threads)
            self.dtype = self.args.dtype
            kind = "bfloat16" if self.dtype == "bf16" else self.dtype
            if self.args.gguf:
                self.dtype = f"{Path(self.args.gguf).stem}, rows in {self.dtype}"
            limits = Limits(2 << 30, MOST_RUNNING, prefix_cache=False)
            self.engine = Bench.load(self.args.gguf or str(self.model), kind).engine({}, limits)

        def serve(self, reqs: list[tuple[float, list[int], int]]) -> tuple[float, list[list[float]]]:
            import torch

            with torch.inference_mode():  # as the server's loop does
                return drive(self.engine, reqs)

        def generate(self, batch: list[list[int]], n: int) -> None:
            self.serve([(0.0, prompt, n) for prompt in batch])

    return Phasewise


def drive(engine: Any, reqs: list[tuple[float, list[int], int]]) -> tuple[float, list[list[float]]]:
    """Requests (arrival, prompt, new tokens) through an engine: when it started, and when each token of each came."""
    from phasewise.request.params import Params
    from phasewise.request.request import Request

    start = time.perf_counter()
    times: list[list[float]] = [[] for _ in reqs]
    live: dict[int, Request] = {}
    following = 0
    while following < len(reqs) or live:
        now = time.perf_counter() - start
        while following < len(reqs) and reqs[following][0] <= now:
            _, prompt, new = reqs[following]
            request = Request(list(prompt), Params(max_tokens=new, ignore_eos=True))
            engine.add(request)
            live[following] = request
            following += 1
        if not live:
            time.sleep(max(0.0, reqs[following][0] - now))
            continue
        engine.step()
        now = time.perf_counter()
        for i, request in list(live.items()):
            times[i].extend([now] * (request.n_out - len(times[i])))
            if request.left is not None:
                if len(times[i]) != reqs[i][2]:
                    raise RuntimeError(f"request {i} made {len(times[i])} tokens: {request.left}")
                del live[i]
    return start, times


def with_ours(plan: Path, root: Path, args: list[str], out: Path) -> None:
    """The plan of the peers that are set up, with this engine in front, in bfloat16 and int8; `args` are for all."""
    entries: list[dict[str, Any]] = [
        {"id": f"phasewise-{dtype}", "peer": "phasewise", "python": sys.executable, "args": ["--dtype", dtype]}
        for dtype in ("bf16", "int8")
    ]
    entries += [entry for entry in json.loads(plan.read_text()) if (root / entry["python"]).exists()]
    for entry in entries:
        entry["args"] = [*entry.get("args", []), *args]
    out.write_text(json.dumps(entries), encoding="utf-8")


FILES = {"S": "S-q4_0", "M": "M-q4_0", "M-all": "M-q4_0-all", "L": "L-q4_k_m", "smollm2": "smollm2", "gemma3": "gemma3"}
FEW_BITS_TESTS = ("prefill512", "decode1", "decode8", "decode16")


def few_bits(root: Path, args: list[str]) -> list[dict[str, Any]]:
    """The plan of what is in four bits: this engine and llama.cpp with the same files, the others with their own.

    This engine's int8, of a checkpoint in bfloat16, stands beside them.
    """
    entries: list[dict[str, Any]] = []
    for size, file in FILES.items():
        gguf = ["--gguf", f"{root}/gguf/{file}.gguf"]
        own = [{"id": f"phasewise-{rows}-{file}", "peer": "phasewise", "python": sys.executable,
                "args": ["--dtype", rows, *gguf]} for rows in ("bf16", "int8")]  # fmt: skip
        other = {"id": f"llama-{file}", "peer": "llama.cpp", "python": "base/bin/python",
                 "args": ["--dtype", file, "--llama", f"{root}/llama-avx512", *gguf]}  # fmt: skip
        entries += [{**each, "sizes": [size]} for each in (*own, other)]
    entries += [
        {"id": f"phasewise-{rows}-M-int4-g128", "peer": "phasewise", "python": sys.executable,
         "args": ["--dtype", rows, "--gguf", f"{root}/ckpt/M-int4-g128"], "sizes": ["M"]} for rows in ("bf16", "int8")
    ]  # fmt: skip
    plain = {"sizes": ["S", "M", "L"]}
    entries += [
        {"id": "phasewise-int8", "peer": "phasewise", "python": sys.executable, "args": ["--dtype", "int8"], **plain},
        {"id": "openvino-int4", "peer": "openvino-genai", "python": "ov/bin/python",
         "args": ["--dtype", "int4", "--ov-dir", f"{root}/ov_ckpt/{{size}}-int4"], **plain},
        {"id": "ort-int4", "peer": "onnxruntime-genai", "python": "ort/bin/python",
         "args": ["--dtype", "int4", "--ort-dir", f"{root}/ort_ckpt/{{size}}-int4"], **plain},
    ]  # fmt: skip
    return [{**each, "args": [*each["args"], *args], "tests": list(FEW_BITS_TESTS)} for each in entries]


def taken(name: str) -> str | None:
    """The value of an option of the command line, which `all` knows nothing of."""
    if name not in sys.argv:
        return None
    at = sys.argv.index(name)
    value = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    return value


def main() -> None:
    tools = os.environ.get(TOOLS, "")
    if sys.argv[1:2] == ["--tools"]:
        tools = sys.argv[2]
        del sys.argv[1:3]
    if not tools:
        sys.exit(__doc__)
    module = load_tools(tools)
    module.PEERS["phasewise"] = phasewise_of(module)
    if sys.argv[1:2] == ["all"] and "--plan" not in sys.argv:
        reps = taken("--reps")
        few = "--few-bits" in sys.argv
        if few:
            sys.argv.remove("--few-bits")
        out, root = (Path(sys.argv[sys.argv.index(name) + 1]) for name in ("--out", "--root"))
        plan, args = out.with_suffix(".plan.json"), [] if reps is None else ["--reps", reps]
        if few:
            plan.write_text(json.dumps(few_bits(root.resolve(), args)), encoding="utf-8")
        else:
            with_ours(Path(tools) / "plan.json", root, args, plan)
        sys.argv += ["--plan", str(plan)]
    module.main()


if __name__ == "__main__":
    main()
