"""One contender in a process of its own: load the model once, run every test, one JSON line per result on stdout.

python -m phasewise.bench.contender '{"contender": "transformers", "model": "DIR", ...}'
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from random import Random
from typing import Any, Protocol, cast

import torch

from phasewise.bench.machine import cores, peak_rss
from phasewise.errors import UserError

CHECK = (48, 32)  # prompt and new tokens of the output that contenders are held against each other with


@dataclass(frozen=True)
class RoundWork:
    """The work of one contender in one round. `new` and `prompt` are the lengths of the decode tests."""

    contender: str
    model: str
    tests: list[str]
    dtype: str = "bfloat16"
    number: int = 0  # of the round; it seeds the prompts
    new: int = 128
    prompt: int = 128
    threads: int = 0  # 0: every core
    verbs: dict[str, str] = field(default_factory=dict)  # this and the next three: of phasewise itself
    kv_bytes: int | None = None
    max_running: int = 64
    weights: str | None = None

    def text(self) -> str:
        return json.dumps(asdict(self))


class Contender(Protocol):
    def version(self) -> str: ...
    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Exactly `new` greedy tokens per prompt, the end token ignored."""
        ...


class Phasewise:
    """This engine, its prefix cache off."""

    def __init__(self, job: RoundWork) -> None:
        from phasewise.bench.drive import Bench
        from phasewise.engine.limits import Limits

        limits = Limits(job.kv_bytes, job.max_running, prefix_cache=False)
        self.engine = Bench.load(job.model, job.dtype, weights=job.weights).engine(job.verbs, limits)

    def version(self) -> str:
        return version("phasewise")

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        from phasewise.bench.drive import drive
        from phasewise.bench.workloads import Shot

        return [r.out for r in drive(self.engine, [Shot(0.0, prompt, new) for prompt in prompts]).requests]


class Transformers:
    """transformers' `generate`: prompts of one length as one batch."""

    def __init__(self, job: RoundWork) -> None:
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        kind = getattr(torch, job.dtype)
        self.model: Any = auto.from_pretrained(job.model, dtype=kind).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def version(self) -> str:
        return version("transformers")

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, use_cache=True
        )
        return [row[ids.shape[1] :] for row in out.tolist()]


class TransformersContinuous(Transformers):
    """transformers' continuous batching: what `generate_batch` runs on, kept running from one call to the next."""

    PAGE, STEP_TOKENS = 32, 2048

    def __init__(self, job: RoundWork) -> None:
        super().__init__(job)
        from transformers import ContinuousBatchingConfig, GenerationConfig

        tests = [Test.parse(name) for name in job.tests]
        longest = max(t.batch * (t.length(job) + job.new + 1 + self.PAGE) for t in tests)
        config = ContinuousBatchingConfig(
            page_size=self.PAGE, num_blocks=2 * (longest + sum(CHECK)) // self.PAGE + 16,
            max_batch_tokens=self.STEP_TOKENS, max_requests_per_batch=max(t.batch for t in tests) + 1,
            allow_block_sharing=False, use_cuda_graph=False, use_async_batching=False,
        )  # fmt: skip
        greedy = cast(Any, GenerationConfig)(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=job.new + 1
        )
        self.manager = self.model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
        self.manager.start()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        names = [self.manager.add_request(list(prompt), max_new_tokens=new) for prompt in prompts]
        done: dict[str, list[int]] = {}
        while len(done) < len(names):
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError("continuous batching stopped")
                continue
            if result.error:
                raise RuntimeError(result.error)
            if result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in names]

    def close(self) -> None:
        self.manager.stop(block=True)


CONTENDERS: dict[str, Callable[[RoundWork], Contender]] = {
    "phasewise": Phasewise,
    "transformers": Transformers,
    "transformers-cb": TransformersContinuous,
}


@dataclass(frozen=True)
class Test:
    """`decodeB`: tokens/s of B sequences decoding together; `prefillN`: prompt tokens/s of one N-token prompt."""

    kind: str
    size: int

    @classmethod
    def parse(cls, name: str) -> Test:
        found = re.fullmatch(r"(decode|prefill)([1-9]\d*)", name)
        if not found:
            raise UserError(f"unknown test {name!r}: write decodeB (B sequences at once) or prefillN (N prompt tokens)")
        return cls(found[1], int(found[2]))

    @property
    def batch(self) -> int:
        return self.size if self.kind == "decode" else 1

    def length(self, job: RoundWork) -> int:
        """Tokens of each prompt."""
        return job.prompt if self.kind == "decode" else self.size


class Stopwatch:
    """Times a contender on prompts that never come twice within a round and are the same for all contenders of it."""

    def __init__(self, contender: Contender, job: RoundWork, vocab: int) -> None:
        self.contender, self.job, self.vocab = contender, job, vocab

    def prompts(self, name: str, batch: int, length: int) -> list[list[int]]:
        rng = Random(f"{self.job.number} {name}")
        return [[rng.randrange(min(3, self.vocab - 1), self.vocab) for _ in range(length)] for _ in range(batch)]

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        start = time.perf_counter()
        out = self.contender.generate(prompts, new)
        taken = time.perf_counter() - start
        if [len(tokens) for tokens in out] != [new] * len(prompts):
            raise RuntimeError(f"asked for {new} tokens each, got {[len(tokens) for tokens in out]}")
        return taken

    def measure(self, name: str) -> dict[str, Any]:
        """Tokens per second. Decoding is the time of new + 1 tokens less that of one: prefill does not count."""
        test, job = Test.parse(name), self.job
        length = test.length(job)
        self.seconds(self.prompts(f"{name} warm-up", test.batch, length), min(4, job.new))
        if test.kind == "prefill":
            times = [self.seconds(self.prompts(f"{name} {i}", 1, length), 1) for i in range(3)]
            return {"value": length / statistics.median(times), "seconds": times}
        first = statistics.median(
            self.seconds(self.prompts(f"{name} first {i}", test.batch, length), 1) for i in range(3)
        )
        whole = self.seconds(self.prompts(name, test.batch, length), job.new + 1)
        value = test.batch * job.new / (whole - first) if whole > first else None
        return {"value": value, "seconds": [first, whole]}


def main(text: str) -> None:
    """Run a job given as JSON."""
    job = RoundWork(**json.loads(text))
    torch.set_num_threads(job.threads or cores())
    start = time.perf_counter()
    contender = CONTENDERS[job.contender](job)
    loaded = time.perf_counter() - start
    stopwatch = Stopwatch(contender, job, _vocab(job.model))
    about = {
        "contender": job.contender, "version": contender.version(), "dtype": job.dtype, "round": job.number,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    check = contender.generate(stopwatch.prompts("check", 1, CHECK[0]), CHECK[1])
    print(json.dumps({**about, "test": "check", "tokens": check[0], "load_s": loaded}), flush=True)
    for name in job.tests:
        result = stopwatch.measure(name)
        print(json.dumps({**about, "test": name, **result, "peak_rss_bytes": peak_rss()}), flush=True)
    if hasattr(contender, "close"):
        contender.close()


def _vocab(model: str) -> int:
    """Size of the vocabulary by the model's settings."""
    from phasewise.load import files_of

    return files_of(model).settings().size("vocab_size")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except UserError as wrong:
        sys.exit(f"error: {wrong}")
