"""A published system as data: its claim, who is compared on what, closed forms, and what would count against it.

A file in `systems/` holds one `System`. It states the claim as conditions on answers, cost and time. Nothing in it is
a result: every number that a report shows comes from runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from phasewise.model.config import ModelConfig
    from phasewise.reproduce.lab import Lab
    from phasewise.reproduce.play import LoadEntry, PlayedRun
    from phasewise.reproduce.workload import PromptSource
    from phasewise.request.counters import Counters

Role = Literal["method", "baseline", "control"]
Kind = Literal["answers", "cost", "time"]
Part = Literal["exact", "counter", "answers", "cost", "time", "mechanism", "control"]
"""What a check is about. Answers, cost and time are conditions; a mechanism is how the paper says that they come."""
Value = float | tuple[float, ...]
Load = Callable[["PromptSource"], "list[LoadEntry]"]
"""What is asked of an engine; the same for everybody, new prompts for every seed."""


@dataclass(frozen=True)
class Paper:
    """The paper, or another place, that describes a system."""

    title: str
    arxiv: str = ""  # "2404.14469"; empty where there is no paper
    where: str = ""  # instead of a paper

    def __str__(self) -> str:
        return f"{self.title} ({f'arXiv {self.arxiv}' if self.arxiv else self.where})"


@dataclass(frozen=True)
class Setting:
    """A contender: methods by name as on the command line; `objects` are methods that no catalogue lists (controls)."""

    verbs: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    prefix_cache: bool = False
    cluster: str = "inline"
    most: int = 64  # requests that may share a step
    load: Load | None = None  # where it is asked something else than the others
    model: str = ""  # where it runs on another one than the others

    def __str__(self) -> str:
        words = [f"{verb}={method}" for verb, method in self.verbs.items()]
        words += [f"{verb}={method!r}" for verb, method in self.objects.items()]
        words += [f"--model {self.model}"] * bool(self.model)
        words += ["--cluster processes"] * (self.cluster == "processes")
        words += ["(asked something else)"] * (self.load is not None)
        return " ".join(words) or "the defaults"


@dataclass(frozen=True)
class Case:
    """The runs of a system by role, on a model whose rows take so many bytes of KV in all layers."""

    runs: Mapping[str, PlayedRun]
    config: ModelConfig
    row_bytes: int

    @property
    def method(self) -> PlayedRun:
        return self.runs["method"]

    @property
    def work(self) -> Counters:
        return self.method.work

    @property
    def entries(self) -> Sequence[LoadEntry]:
        return self.method.entries


@dataclass(frozen=True)
class Counter:
    """A number that does not depend on the machine, against its closed form.

    It passes if both are equal, or off by at most the share `within`; where the form is a `bound`, if it is not beyond.
    With a `load` of its own it is counted on that, for the setting `who` (the method's own, if None).
    """

    name: str
    form: str  # the closed form in words
    measured: Callable[[Case], Value]
    predicted: Callable[[Case], Value]
    within: float = 0.0
    bound: Literal["at most", "at least"] | None = None
    load: Load | None = None
    who: Setting | None = None


@dataclass(frozen=True)
class KnobRatio:
    """A cost of the baseline over the method's that follows from the knobs alone, whatever the model does.

    It is printed as arithmetic. It is never a check, because it cannot fail.
    """

    name: str
    cost: Callable[[Case, PlayedRun], float]


@dataclass(frozen=True)
class Saving:
    """A measured cost that must be `least` times smaller with the method than with another contender.

    `against` "rivals" is the cheapest of the system's rivals. With a `load` or a `model` of its own it is measured on
    these; `settings` replace contenders by role or by the name of a rival.
    """

    name: str
    cost: Callable[[Case, PlayedRun], float]
    against: Literal["baseline", "control", "rivals"]
    least: float = 1.1
    load: Load | None = None
    model: str = ""
    settings: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class Quality:
    """Answers to checkable tasks, or the loss on held-out code, on the same examples for everybody.

    The method keeps its quality if the 95 % interval of its paired difference to the baseline lies above -`allowed`;
    it is better than a rival, or than the baseline where `gains`, if that interval lies above 0; the control loses if
    the interval of the method's lead over it lies above 0. Tasks on which the baseline answers less than 20 % or more
    than 95 % are measured and not counted.
    """

    tasks: tuple[str, ...]  # rows of reproduce.answers
    allowed: float | None  # share of right answers; for the loss on code, nats per token; None: nothing is to be kept
    examples: int  # of each task
    window: int = 0  # tokens of a stretch of code
    given: int = 16  # its tokens that are the prompt; the others are judged
    edited: int = 0  # its tokens that are new in a text known so far; what stands at its end is then judged
    baseline: Setting | None = None  # where the answers are to be compared with somebody else's
    model: str = "pocket"
    temperature: float = 0.0  # of the answers; code is written by force, whatever it is
    gains: bool = False  # the claim is that answers get better, not that they are kept
    rivals: Mapping[str, Setting] = field(default_factory=dict)  # of equal cost, which the paper says are worse
    settings: Mapping[str, Setting] = field(default_factory=dict)  # contenders by role, where they are others here
    alone: bool = False  # no control is asked: the system's own could not win, and attempts have fairer ones


@dataclass(frozen=True)
class Timing:
    """Seconds of the baseline over those of the method, in interleaved rounds; passes if every round is above `least`.

    `tokens` above 0: both hold a request of so many tokens, and a round decodes some more of them. Otherwise a round
    plays the load, and `seconds` says what of it counts. `settings` replace contenders by role. With `price` the ratio
    is shown and judged by nobody: it can support no claim of speed.
    """

    name: str
    least: float = 1.0
    seconds: Callable[[PlayedRun], float] | None = None
    against: str = "baseline"  # or "control", or a rival's name
    load: Load | None = None
    model: str | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    tokens: int = 0
    price: bool = False


@dataclass(frozen=True)
class AttemptOutcome:
    """The outcome of an attempt, in words. `passed` None: it was not examined, as nothing could be measured.
    `baseline` is the share of right answers that the baseline gives, where the attempt asks whether answers are kept:
    without headroom it is not counted."""

    passed: bool | None
    measured: str
    baseline: float | None = None


@dataclass(frozen=True)
class Attempt:
    """Something of the claim that is tried out in a way of its own; a control says of which part it is one."""

    part: Part
    name: str
    expected: str
    run: Callable[[Lab], AttemptOutcome]
    of: Part | None = None
    model: str = ""


@dataclass(frozen=True)
class System:
    """One published system.

    `promises` says which of answers, cost and time the paper's claim is about: each needs a check that is judged.
    `missing` are parts of the claim that nobody examines here. Either spoils a *holds*.
    """

    title: str
    paper: Paper
    claim: str  # with the paper's numbers
    conditions: tuple[str, ...]  # under which the paper measured them
    method: Setting
    baseline: Setting
    control: Setting
    control_is: str  # why it must lose
    load: Load
    model: str = "pocket"
    line: str = ""  # the claim in one line of the overview
    promises: tuple[Kind, ...] = ()
    rivals: Mapping[str, Setting] = field(default_factory=dict)  # by name; they do the same work and lack the idea
    exact: bool = False  # the baseline's tokens come out; compared in float32, where no rounding decides a near-tie
    missing: tuple[str, ...] = ()
    counters: tuple[Counter, ...] = ()
    arithmetic: tuple[KnobRatio, ...] = ()
    savings: tuple[Saving, ...] = ()
    quality: tuple[Quality, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    timings: tuple[Timing, ...] = ()
    note: str = ""  # explains; decides nothing

    @property
    def dtype(self) -> str | None:
        """The dtype in which counters and tokens are taken. Answers and times are taken in the checkpoint's own."""
        return "float32" if self.exact else None

    @property
    def roles(self) -> dict[Role, Setting]:
        return {"method": self.method, "baseline": self.baseline, "control": self.control}

    @property
    def everybody(self) -> dict[str, Setting]:
        """The contenders by role, as plain words."""
        return {str(role): setting for role, setting in self.roles.items()}

    @property
    def contenders(self) -> dict[str, Setting]:
        """The contenders by role, and the rivals by name."""
        return {**self.everybody, **self.rivals}
