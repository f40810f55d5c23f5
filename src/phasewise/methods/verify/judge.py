"""Accept guesses that the model would not have made, where it is not taken aback by them (Judge Decoding, arXiv
2501.19309; trained as AutoJudge, arXiv 2504.20039): lossy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.verify.rejection import Rejection
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.verbs.draft import Draft
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Dist
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random, Shown

REJECTION = Rejection()


@dataclass(frozen=True)
class JudgeDecoding(Method):
    """A guess is accepted if `rejection` accepts it, or if sigmoid(w h + b) > `threshold`. h is the model's last state
    at the guess itself, after the final norm: what the model makes of having read it. The pass that verifies the guess
    has computed it anyway.

    Where `rejection` accepts no child of a node, the child of the highest score is taken if that is above the
    threshold; so chains keep their longest beginning of accepted guesses. What a request's own rules exclude (a
    grammar, top-p) is never accepted. With threshold=1 this is `rejection` itself; threshold=0 accepts every guess.

    `weights`: `auto` (trained for this model), a file, or `random:SEED`. They are mined without people
    (train/artefacts/verify_judge.py): a guess of the model `mined` is put into an answer, and counts as unimportant if
    the answer that the model then gives is still right. The trained bias makes 0.5 the threshold that refuses nine of
    ten important guesses. Another drafter than `mined` may be verified. Text of another kind than was mined may lose
    more.

    Left out: the draft model's state as a further feature, and people's labels.
    """

    threshold: float = 0.5
    mined: str = "pocket-draft"
    weights: str = "auto"

    paper: ClassVar[str] = "arXiv 2501.19309"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"threshold": 1.0}
    untrained: ClassVar[dict[str, object]] = {"weights": "random:0"}
    tight: ClassVar[dict[str, object]] = {"threshold": 0.3}

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UserError(f"judge: threshold={self.threshold} must lie in [0, 1]: 1 accepts what rejection accepts")

    def artefact(self, config: ModelConfig) -> Artefact:
        """`weight` of the state, standardisation included; `bias`: the sum of two numbers, of which the second is what
        rounding has taken from the first."""
        return Artefact(
            "verify.judge", {"weight": (config.hidden,), "bias": (2,)}, {"mined": self.mined},
            "say threshold=1 to judge nothing",
        )  # fmt: skip

    @property
    def traits(self) -> Traits:
        if self.threshold == 1:
            return REJECTION.traits
        return Traits("verify", wants=frozenset({"hidden", "logits"}))

    def bind(self, host: Host) -> Rejection | JudgeVerifier:
        if self.threshold == 1:
            return REJECTION
        tensors = host.artefact(self.artefact(host.model.config), self.weights)
        weight = tensors["weight"].to(host.model.device, torch.float64)
        return JudgeVerifier(host.model.norm, weight, float(tensors["bias"].double().sum()), odds(self.threshold))


def odds(threshold: float) -> float:
    """The score whose sigmoid is the threshold: -inf for 0, inf for 1."""
    if threshold in (0, 1):
        return math.inf if threshold else -math.inf
    return math.log(threshold / (1 - threshold))


class JudgeVerifier:
    """`norm`: the model's final one; `weight` float64 [d]; a guess is good if its score is above `least`."""

    def __init__(self, norm: Callable[[Tensor], Tensor], weight: Tensor, bias: float, least: float) -> None:
        self.norm, self.weight, self.bias, self.least = norm, weight, bias, least

    def __call__(self, draft: Draft, p: Dist, rng: Random, shown: Shown) -> tuple[list[int], int]:
        assert shown.hidden is not None and shown.logits is not None
        scores = self.scores(shown.hidden[1:]) if draft.tokens else []  # row i + 1 is that of node i itself
        path: list[int] = []
        while True:
            node = path[-1] if path else -1
            children = draft.children(node)
            child, token = _verdict(draft, children, p.part(node + 1, node + 2), rng, len(path))
            if child is None:
                child = self._judged(draft, children, node, p, shown.logits[node + 1], scores)
            if child is None:
                return path, token
            path.append(child)

    def scores(self, rows: Tensor) -> list[float]:
        """Scores of rows of the last layer [n, d], in float64: a row's does not hang on the others to any digit that
        decides."""
        found: list[float] = torch.mv(self.norm(rows).double(), self.weight).add(self.bias).tolist()
        return found

    def _judged(
        self, draft: Draft, children: Sequence[int], node: int, p: Dist, logits: Tensor, scores: Sequence[float]
    ) -> int | None:
        """The child that is accepted though `rejection` accepts none; of equally good ones the first."""
        good = [child for child in children if scores[child] > self.least]
        if good:
            tokens = torch.tensor([draft.tokens[child] for child in good], device=logits.device)
            allowed = logits[tokens] > -math.inf
            if not p.greedy(node + 1):
                allowed &= p.row(node + 1)[tokens] > 0
            good = [child for child, may in zip(good, allowed.tolist()) if may]
        return max(good, key=lambda child: scores[child], default=None)


def _verdict(
    draft: Draft, children: Sequence[int], p: Dist, rng: Random, before: int
) -> tuple[int | None, int]:  # fmt: skip
    """The child that `rejection` accepts, or None, and then the token that it gives instead. `p`: the one row behind
    their parent, `before` tokens after the pending one."""
    q = None if draft.q is None else draft.q[children]
    level = Draft([draft.tokens[child] for child in children], [-1] * len(children), draft.drawn, q)
    for _ in children:
        p = p.longer()  # nothing is asked of what follows them

    def later(depth: int, purpose: int, index: int = 0) -> float:
        return rng(before + depth, purpose, index)

    path, token = REJECTION(level, p, later)
    return (children[path[0]] if path else None), token
