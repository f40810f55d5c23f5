"""What speculation gains at a set acceptance, against the closed form: tokens per pass over the cost of a pass.

    python scripts/speculation_gain.py [--model DIR] [--dtype bfloat16|int8] [--k 1,3,7] [--accept 0,0.5,0.8,1]
                                       [--prompt 64] [--passes 48] [--rounds 5] [--seed 0]

One request at a time, greedy. A scripted drafter, which costs nothing, knows what the model will say; each of its k
guesses is right with probability a. A pass then gives E = 1 + a + ... + a^k tokens and takes c(k) times as long as one
of a single row; c(k) is measured in the same rounds with drafts that are always wrong, so the lines of a = 0 agree
with the prediction by construction. `off` compares the gain in wall clock with E / c(k), round by round. Every run
has as many passes after the one that gives its first token. Rounds are interleaved over all settings; medians of paired
ratios, and their range. Prints two Markdown tables; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasewise.bench import machine, report
from phasewise.bench.drive import Bench
from phasewise.bench.prompts import random_prompts
from phasewise.bench.rounds import Ratio, order, ratio
from phasewise.bench.scripted import Scripted, expected
from phasewise.cli.progress import counting, working
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.rejection import Rejection
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed

PLAIN = (0, 0.0)
Setting = tuple[int, float]
"""k guesses, each right with probability a."""


@dataclass(frozen=True)
class Timed:
    """The whole passes of one run, and whether its tokens were plain decoding's."""

    seconds: float
    passes: int
    tokens: int
    same: bool

    @property
    def per_pass(self) -> float:
        return self.seconds / self.passes

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens


Runs = Mapping[Setting, Mapping[int, Timed]]
"""By setting, then round."""


@dataclass(frozen=True)
class Contender:
    """An engine, and the drafter it asks; none where decoding is plain."""

    engine: Placed
    drafter: Scripted | None

    def run(self, prompt: Sequence[int], passes: int, continuation: Sequence[int], seed: str) -> Timed:
        k = 0 if self.drafter is None else self.drafter.k
        request = Request(prompt, Params(max_tokens=longest(passes, k), ignore_eos=True))
        if self.drafter is not None:
            self.drafter.tell(request, continuation[: longest(passes, k)], seed)
        self.engine.add(request)
        stamps = request.trace.tokens
        while request.left is None and len(stamps) <= passes:
            self.engine.step()
        if len(stamps) <= passes:
            assert request.left is not None
            raise UserError(f"a run failed: {request.left.reason}")
        self.engine.cancel(request)
        same = request.out == list(continuation[: request.n_out])
        return Timed(stamps[passes] - stamps[0], passes, sum(request.trace.counts[1 : passes + 1]), same)


def longest(passes: int, k: int) -> int:
    """Tokens after the prompt in which no draft of so many passes is cut."""
    return 2 + passes * (k + 1)


def main(argv: Sequence[str] | None = None) -> None:
    asked = arguments(argv)
    with working(f"loading {asked.model}"):
        bench = Bench.load(asked.model, asked.dtype)
    settings = [PLAIN, *((k, a) for k in asked.k for a in sorted({0.0, *asked.accept}))]
    runs = measured(bench, settings, asked)
    about = machine.describe()
    print(f"{asked.model}, {asked.dtype or 'own dtype'}; {about['cpu']}, {about['threads']} threads; a prompt of "
          f"{asked.prompt} tokens, {asked.passes} passes, {asked.rounds} rounds, seed {asked.seed}\n")  # fmt: skip
    print(costs(runs, asked.k) + "\n")
    print(gains(runs) + "\n")
    every = [run for key in runs for run in runs[key].values()]
    print(f"Tokens equal plain greedy in {sum(run.same for run in every)} of {len(every)} runs.")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--dtype", help="default: the checkpoint's own")
    parser.add_argument("--k", type=whole, default=[1, 3, 7], help="guesses per pass")
    parser.add_argument("--accept", type=shares, default=[0, 0.5, 0.8, 1], help="probability that a guess is right")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--passes", type=int, default=48, help="passes of a run that are timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def whole(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def shares(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def measured(bench: Bench, settings: Sequence[Setting], asked: argparse.Namespace) -> Runs:
    """Every setting once a round, all on one prompt, whose plain continuation is recorded first."""
    contenders = {setting: contender(bench, setting) for setting in settings}
    prompt = random_prompts(bench.model.config.vocab, asked.seed)(asked.prompt)
    known = continued(contenders[PLAIN].engine, prompt, longest(asked.passes, max(k for k, _ in settings)))
    runs: dict[Setting, dict[int, Timed]] = {setting: {} for setting in settings}
    with counting("runs", asked.rounds * len(settings)) as tell:
        for number in range(-1, asked.rounds):  # a first, short round warms up
            passes = asked.passes if number >= 0 else min(asked.passes, 4)
            for done, setting in enumerate(order(settings, number), 1):
                run = contenders[setting].run(prompt, passes, known, f"{asked.seed} {number} {setting}")
                if number >= 0:
                    runs[setting][number] = run
                    tell(number * len(settings) + done)
    return runs


def continued(engine: Placed, prompt: Sequence[int], new: int) -> list[int]:
    request = Request(prompt, Params(max_tokens=new, ignore_eos=True))
    engine.add(request)
    with counting("tokens known beforehand", new) as tell:
        while request.left is None:
            engine.step()
            tell(request.n_out)
    if request.n_out < new:
        raise UserError(f"the model's own continuation ended after {request.n_out} of {new} tokens: lower --passes")
    return request.out


def contender(bench: Bench, setting: Setting) -> Contender:
    limits = Limits(max_running=1, prefix_cache=False)
    if setting == PLAIN:
        return Contender(bench.engine({}, limits), None)
    drafter = Scripted(*setting, bench.model.config.vocab)
    return Contender(bench.engine({}, limits, decode=Speculative(drafter, Rejection())), drafter)


def per_pass(runs: Runs, setting: Setting) -> dict[int, float]:
    return {number: run.per_pass for number, run in runs[setting].items()}


def cost(runs: Runs, k: int) -> Ratio:
    """c(k): a pass of k + 1 rows against one of a single row."""
    found = ratio(per_pass(runs, (k, 0.0)), per_pass(runs, PLAIN))
    assert found is not None
    return found


def costs(runs: Runs, ks: Sequence[int]) -> str:
    body = []
    for k in [0, *ks]:
        times = statistics.median(per_pass(runs, (k, 0.0)).values())
        body.append([str(k + 1), report.milliseconds(times), str(cost(runs, k)) if k else "1"])
    return report.markdown(["rows per pass", "time of a pass", "against one row"], body)


def gains(runs: Runs) -> str:
    header = ["k", "a", "E", "tokens per pass", "gain", "E / c", "off", "same tokens"]
    plain = {number: run.per_token for number, run in runs[PLAIN].items()}
    body = []
    for (k, accept), mine in runs.items():
        if not k:
            continue
        gain = ratio(plain, {number: run.per_token for number, run in mine.items()})
        slowed = ratio(per_pass(runs, PLAIN), per_pass(runs, (k, 0.0)))  # 1 / c(k)
        # gain / (E / c): in one round the plain run cancels out
        off = ratio(per_pass(runs, (k, 0.0)), {n: run.per_token * expected(accept, k) for n, run in mine.items()})
        assert gain is not None and off is not None and slowed is not None
        given = statistics.median(run.tokens / run.passes for run in mine.values())
        body.append([
            str(k), f"{accept:g}", f"{expected(accept, k):.2f}", f"{given:.2f}", str(gain),
            f"{expected(accept, k) * slowed.median:.2f}", f"{off.median - 1:+.1%}",
            f"{sum(run.same for run in mine.values())} of {len(mine)}",
        ])  # fmt: skip
    return report.markdown(header, body)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
