"""PEARL: the draft model guesses while the target verifies."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch

from phasewise.bench.rounds import order, ratio
from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun, play
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Load, Paper, Saving, Setting, System
from phasewise.reproduce.workload import PromptSource

K, TEMPERATURE = 3, 1.0
LOAD = loads.answering("json", "arithmetic", "list", n=16)


def beside(model: str, where: str = "inline", judged: str = "drawn") -> Setting:
    return Setting({"draft": f"pearl:model={model},k={K},where={where},judged={judged}"}, most=1)


def writing(asked: PromptSource) -> list[LoadEntry]:
    """Texts so long that how they begin and end is a small part of them."""
    return [LoadEntry(asked.code(64), asked.size(160, 96)) for _ in range(6)]


def hot(asked: PromptSource) -> list[LoadEntry]:
    """The same questions, answered at a temperature."""
    return [replace(entry, temperature=TEMPERATURE) for entry in LOAD(asked)]


def hot_writing(asked: PromptSource) -> list[LoadEntry]:
    return [replace(entry, temperature=TEMPERATURE) for entry in writing(asked)]


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


def rounds(case: Case) -> list[int]:
    """Rows of the target in every pass after the prompts'."""
    return [step.rows for step in case.method.steps if step.streams]


def per_round(case: Case) -> float:
    return (case.work.emitted - len(case.entries)) / len(rounds(case))


def expected(case: Case) -> float:
    """[1/a + 1/(1 - a)] / [1/a + 1/(1 - a^k)], a being the share of judged guesses that hold: each wrong one is
    followed by a round without a draft, as is each prompt."""
    wrong = rounds(case).count(1) - len(case.entries)
    a = 1 - wrong / (case.work.emitted - len(case.entries))
    return float((1 / a + 1 / (1 - a)) / (1 / a + 1 / (1 - a**K)))


def twins(lab: Lab) -> AttemptOutcome:
    """The same load, greedy and sampled, with the draft model in a process of its own."""
    found = []
    for where in ("inline", "process"):
        load = LOAD(lab.asked("pocket")) + hot(lab.asked("pocket"))
        run = lab.play(beside("pocket-draft", where), load, "pocket", "float32")
        found.append((run.outs, run.work.as_dict()))
    (outs, work), (other_outs, other_work) = found
    off = [name for name in work if work[name] != other_work[name]]
    words = "the same tokens" if outs == other_outs else "other tokens"
    return AttemptOutcome(
        outs == other_outs and not off, f"{words}, {', '.join(off) + ' off' if off else 'all counters equal'}"
    )


def compared(lab: Lab) -> AttemptOutcome:
    """Passes per token of guesses judged by what they were drawn from, and of those compared with the target's draw.
    Over code: in short answers there is little to choose, and both are right equally often."""
    each = {}
    for judged in ("drawn", "equal"):
        load = [entry for number in range(2) for entry in hot_writing(lab.asked("pocket", number))]
        run = lab.play(beside("pocket-draft", judged=judged), load, "pocket")
        each[judged] = run.work.forwards / run.work.emitted
    drawn, equal = each.values()
    return AttemptOutcome(drawn < equal, f"{drawn:.3f} against {equal:.3f}")


def against_plain(lab: Lab) -> AttemptOutcome:
    return _one_core_each(lab, Setting(most=1))


def against_turns(lab: Lab) -> AttemptOutcome:
    return _one_core_each(lab, Setting({"draft": f"draft_model:model=pocket-draft-wide,k={K}"}, most=1))


def against_turns_sampled(lab: Lab) -> AttemptOutcome:
    return _one_core_each(lab, Setting({"draft": f"draft_model:model=pocket-draft-wide,k={K}"}, most=1), hot)


def _one_core_each(lab: Lab, other: Setting, load: Load = LOAD) -> AttemptOutcome:
    """Seconds per token of another setting over those of the method, models padded; a thread for each model."""
    settings = {"beside": beside("pocket-draft-wide", "process"), "other": other}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            engines = {name: stack.enter_context(lab.engine(each, "pocket-wide")) for name, each in settings.items()}
            seconds: dict[str, dict[int, float]] = {name: {} for name in engines}
            for number in range(-1, lab.scale.rounds):
                for name in order(list(engines), number + 1):
                    run = play(engines[name], load(lab.asked("pocket-wide", number + 2)), watch=False)
                    if number >= 0:  # the first one starts the process
                        seconds[name][number] = loads.pace(run)
    finally:
        torch.set_num_threads(threads)
    return _faster(seconds)


def _faster(seconds: Mapping[str, Mapping[int, float]]) -> AttemptOutcome:
    found = ratio(seconds["other"], seconds["beside"])
    assert found is not None
    return AttemptOutcome(found.low > 1, f"{found} times as fast in {found.n} rounds")


SYSTEM = System(
    title="PEARL",
    paper=Paper("PEARL: Parallel Speculative Decoding with Adaptive Draft Length", "2408.11850"),
    claim="drafting and verifying at the same time, with the first guess verified early and the next ones drafted "
    "ahead, gives up to 3.79 times the speed of plain decoding and 1.52 times that of speculative decoding in turns.",
    conditions=("draft and target on GPUs of their own, H100 and A100", "drafts of 1B to 7B for targets of 33B to 70B",
                "one request at a time, as many guesses as draft passes fit into one of the target"),
    method=beside("pocket-draft"),
    baseline=Setting(most=1),
    control=beside("untrained-draft"),
    control_is="a draft of the same shape with random weights",
    line="draft and target at the same time: 3.79 times plain decoding, 1.52 times drafting in turns",
    promises=("cost", "time"),
    load=LOAD,
    exact=True,
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("tokens per round", "[1/a + 1/(1 - a)] / [1/a + 1/(1 - a^k)] at the acceptance measured", per_round,
                expected, within=0.1, load=writing),
        Counter(f"tokens per round, T={TEMPERATURE:g}", "the same", per_round, expected, within=0.1, load=hot_writing),
        Counter("passes of the draft model", f"{K} a round", lambda case: case.work.draft_forwards,
                lambda case: K * len(rounds(case)), bound="at most"),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving(f"passes per token, T={TEMPERATURE:g}", passes, "baseline", 1.5, load=hot),
        Saving("passes per token", passes, "control", 1.2),
    ),
    attempts=(
        Attempt("exact", "the draft model in a process of its own", "the twin's tokens and counters", twins),
        Attempt("mechanism", f"passes per token of code, T={TEMPERATURE:g}, guesses judged by what they were drawn "
                "from, against guesses compared with the target's own draw", "less", compared),
        Attempt("time", "time per token, both models padded, a core for each, against plain decoding on one",
                "above 1 in every round", against_plain),
        Attempt("time", "time per token, both models padded, a core for each, against drafting in turns on one",
                "above 1 in every round", against_turns),
        Attempt("time", f"time per token at T={TEMPERATURE:g}, both models padded, a core for each, against drafting "
                "in turns on one", "above 1 in every round", against_turns_sampled),
    ),
    note="The models share two cores and one memory bus, and reading weights is most of what either does; the paper "
    "gives each a device. Counters are those of the twin in the engine's thread, which does all the same in turns.",
)  # fmt: skip
