"""Draft, then verify in one pass: several tokens per step at the price of one (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from phasewise.catalog import part
from phasewise.speculation.loop import Speculation
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits, joined


@dataclass(frozen=True)
class Speculative(Method):
    """The loop of every drafter, chains and trees alike; `draft` and `verify` hold the methods of those verbs,
    chosen by --draft and --verify or, in parentheses, here.

    Exact as far as its verifier is: greedy tokens are the model's own, sampled ones keep its distribution.
    """

    draft: Any = part("draft")
    verify: Any = part("verify")

    paper: ClassVar[str] = "arXiv 2211.17192"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    @property
    def traits(self) -> Traits:
        both = joined(self.draft.traits, self.verify.traits)
        return replace(both, verb="decode", plain_prompts=True, margin=both.max_nodes)

    def bind(self, host: Host) -> Speculation:
        return Speculation(host, host.bind(self.draft), host.bind(self.verify), self.traits)
