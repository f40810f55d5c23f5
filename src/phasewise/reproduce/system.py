"""A published system as data: its claim, who is compared on what, closed forms, and what would count against it.

A file in `systems/` holds one `System`. Nothing in it is a result: every number that a report shows comes from runs.
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
Part = Literal["exact", "counter", "claim", "quality", "control"]
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
class Saving:
    """A cost of the method that must be at least `least` times smaller than that of the baseline, or of the control."""

    name: str
    cost: Callable[[Case, PlayedRun], float]
    against: Literal["baseline", "control"]
    least: float = 1.1


@dataclass(frozen=True)
class Quality:
    """Answers to checkable tasks, or the loss on held-out code, on the same examples for everybody.

    The method keeps its quality if the 95 % interval of its paired difference to the baseline lies above -`allowed`;
    the control loses if the interval of the method's lead over it lies above 0.
    """

    tasks: tuple[str, ...]  # rows of bench.quality
    allowed: float  # share of right answers; for the loss on code, nats per token
    examples: int  # of each task
    window: int = 0  # tokens of a stretch of code
    given: int = 16  # its tokens that are the prompt; the others are judged
    edited: int = 0  # its tokens that are new in a text known so far; what stands at its end is then judged
    baseline: Setting | None = None  # where the answers are to be compared with somebody else's


@dataclass(frozen=True)
class Timing:
    """Seconds of the baseline over those of the method, in interleaved rounds; passes if every round is above `least`.

    `tokens` above 0: both hold a request of so many tokens, and a round decodes some more of them. Otherwise a round
    plays the load, and `seconds` says what of it counts. `settings` replace contenders by role. With `price` the ratio
    is shown and judged by nobody.
    """

    name: str
    least: float = 1.0
    seconds: Callable[[PlayedRun], float] | None = None
    against: Literal["baseline", "control"] = "baseline"
    load: Load | None = None
    model: str | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    tokens: int = 0
    price: bool = False


@dataclass(frozen=True)
class AttemptOutcome:
    """The outcome of an attempt, in words."""

    passed: bool
    measured: str


@dataclass(frozen=True)
class Attempt:
    """Something of the claim that is tried out in a way of its own."""

    part: Part
    name: str
    expected: str
    run: Callable[[Lab], AttemptOutcome]


@dataclass(frozen=True)
class System:
    """One published system. `missing` are parts of its claim that nobody examines here: they spoil a *holds*."""

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
    exact: bool = False  # the baseline's tokens come out; compared in float32, where no rounding decides a near-tie
    missing: tuple[str, ...] = ()
    counters: tuple[Counter, ...] = ()
    savings: tuple[Saving, ...] = ()
    quality: Quality | None = None
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
