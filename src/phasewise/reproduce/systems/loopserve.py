"""LoopServe: prompts over the lines that hold most of their attention, tokens over rows that are chosen anew."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace

import torch

from phasewise.bench.stats import shares
from phasewise.methods.attend._lines import AttentionLines, masses
from phasewise.methods.attend.loopserve import Looping, LoopServe
from phasewise.model.config import ModelConfig
from phasewise.reproduce import loads
from phasewise.reproduce.controls import Control
from phasewise.reproduce.conversations import FEW, compared, in_turns, leading, number, seconds
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.lines import RandomLines
from phasewise.reproduce.panel import long_texts
from phasewise.reproduce.play import LoadEntry, play
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    KnobRatio,
    Paper,
    Setting,
    System,
    Timing,
)
from phasewise.step.read import Read
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

METHOD = LoopServe(budget=256, every=4, voters=16)  # chosen on second questions of the training part
SHARE = 4  # of a text's rows a part of so many is read, whatever is judged or timed
KNOBS = f"budget={METHOD.budget},voters={METHOD.voters}"
ON = Setting({"attend": f"loopserve:{KNOBS},every={METHOD.every}"})
ONCE = Setting({"attend": f"loopserve:{KNOBS},every=0"})
ALONE = Setting({"attend": f"loopserve:{KNOBS},every={METHOD.every},alpha=1.0"})  # dense prompts
GIVEN_UP = Setting({"evict": f"snapkv:keep={METHOD.budget + METHOD.voters}.0,window={METHOD.voters}"})
OTHERS = Setting(objects={"attend": RandomLines(METHOD)})
KEPT = Setting({**ON.verbs, "decode": "pie"})  # what turns before have left is taken
OTHERS_KEPT = Setting({"decode": "pie"}, OTHERS.objects)
NEW = 42


def chosen(tokens: int) -> Setting:
    return Setting({"attend": f"loopserve:budget={tokens // SHARE},voters={METHOD.voters},every={METHOD.every}"})


def drawn(tokens: int) -> Setting:
    return Setting(objects={"attend": RandomLines(replace(METHOD, budget=tokens // SHARE))})


def read(case: Case) -> int:
    """Chosen rows and all since the voters for every token; the keys before the voters where a choice was due."""
    total, every, voters = 0, METHOD.every, METHOD.voters
    for j in range(NEW - 1):
        since, border = j % every, loads.prompt_rows(case) + j // every * every
        total += 2 * (METHOD.budget + voters + since + 1) + (border - voters if since == 0 else 0)
    return total * case.row_bytes // 2


@dataclass(frozen=True)
class WatchedLoopServe(Control):
    """attend: LoopServe, which notes what share of a prompt's blocks its lines read, and of its attention they hold."""

    of: LoopServe
    read: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Looping:
        return _Watched(self, host.model.config)


class _Watched(Looping):
    def __init__(self, watched: WatchedLoopServe, config: ModelConfig) -> None:
        super().__init__(watched.of, config)
        self.watched = watched

    def lines(self, read: Read) -> AttentionLines:
        found, size, n = super().lines(read), self.knobs.block, read.q.shape[0]
        mass, at = masses(read, list(range(n)), size), read.q_positions // size
        seen = found.of(at, torch.arange(mass.shape[2])[None])
        self.watched.read.append(found.share)
        self.watched.held.append(float((mass * seen).sum() / mass.sum()))
        return found


def lines_hold(lab: Lab) -> AttemptOutcome:
    """Checks the share of attention that lines hold, over all rows of one prompt of code and not the sampled ones
    alone."""
    watched = WatchedLoopServe(METHOD)
    with lab.engine(Setting(), dtype="float32", attend=watched) as engine:
        play(engine, [LoadEntry(lab.asked("pocket").code(1000), 1)], watch=False)
    held, part = statistics.fmean(watched.held), statistics.fmean(watched.read)
    said = f"{held:.3f} of all attention, with {part:.0%} of the pairs, over {len(watched.held)} layers"
    return AttemptOutcome(held >= METHOD.alpha - 0.03 and part < 1, said)


def second_questions(lab: Lab) -> AttemptOutcome:
    """Against the same budget chosen once, by the prompt's end, or drawn at random, and against rows given up there."""
    losing = {"once a turn": ONCE, "random rows": OTHERS, "SnapKV": GIVEN_UP}
    return compared(lab, ON, losing, {"dense": Setting()})


def second_kept(lab: Lab) -> AttemptOutcome:
    """Against dense attention."""
    n = number(lab)
    found = [seconds(lab, each, n) for each in (ON, ALONE, Setting())]
    less, alone = (shares(mine, found[2]) for mine in found[:2])
    words = f"{less.text(True)}; with dense prompts {alone.text(True)}"
    return AttemptOutcome(less.low > -0.1, words, baseline=statistics.fmean(found[2]))


def new_rows(lab: Lab) -> AttemptOutcome:
    """Checks the rows that second questions run as requests of their own."""
    found = in_turns(lab, KEPT, min(FEW, number(lab)))
    said = f"{found.ran:,} rows for prompts of {found.tokens:,} tokens and their answers; by the form {found.new:,}"
    return AttemptOutcome(found.ran == found.new, said)


def turns_kept(lab: Lab) -> AttemptOutcome:
    """Second questions as requests of their own over what the first has left; SnapKV's are written into the same
    request, for it leaves nothing that others could go on from."""
    n = number(lab)
    settings = {"method": KEPT, "computed anew": ON, "random rows": OTHERS_KEPT}
    found = {name: in_turns(lab, each, n).grades for name, each in settings.items()}
    return leading(found | {"SnapKV": seconds(lab, GIVEN_UP, n)}, ("random rows", "SnapKV"))


SYSTEM = System(
    title="LoopServe",
    paper=Paper("LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues",
                "2507.13681"),
    claim="prompts computed over the vertical and slanted lines that hold most of each head's attention, and KV chosen "
    "anew by the newest outputs every so many of them, answer best of all compared methods on 11 multi-turn data sets, "
    "wherever the question stands (numbers in figures only).",
    conditions=("Llama-3.1-8B and Qwen2.5-7B, long multi-turn conversations", "questions at the start, in the middle "
                "or at the end of a turn", "baselines that fix what they keep: SnapKV, StreamingLLM, MInference ..."),
    method=ON,
    baseline=Setting(),
    control=OTHERS,
    control_is="as many lines of either kind and as many rows per head, the first and last ones among them, the others "
    "drawn at random",
    line="rows chosen anew by the newest outputs: best answers over several turns, and faster",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW, least=512),
    missing=("the paper's data sets",),
    counters=(
        Counter("KV bytes read while decoding",
                "budget + voters + rows since, and the keys before the voters once in `every` tokens",
                lambda case: sum(step.read for step in case.method.decoding), read),
    ),
    arithmetic=(KnobRatio("KV bytes read while decoding", lambda case, run: sum(step.read for step in run.decoding)),),
    quality=long_texts(chosen, drawn),
    attempts=(
        Attempt("mechanism", "attention that a prompt's lines hold",
                f"at least {METHOD.alpha - 0.03:g}, with fewer pairs", lines_hold),
        Attempt("control", "second question about the same 1,000 tokens, less one choice a turn, random rows, SnapKV",
                "all of each above 0", second_questions, "answers", "pocket"),
        Attempt("counter", "rows run for the second question as a request over the first one's KV",
                "those of tokens that it has no rows for, and one for each token after the first", new_rows),
        Attempt("answers", "second question over the first one's KV, less random rows and lines, SnapKV",
                "all of each above 0", turns_kept, model="pocket"),
        Attempt("answers", "second question about the same 1,000 tokens, less dense attention",
                "all of it above -10 points", second_kept, model="pocket"),
    ),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192, settings={"method": chosen(8192)}),),
    note="The second question of a conversation is written into the same request, after the first one's answer: what "
    "was chosen for the first is then there, and what it needs is not among it. As a request of its own it takes the "
    "rows that the first has left (decode=pie). Budget, voters and pace were chosen by second questions of the "
    "training part, which are not reported.",
)  # fmt: skip
