"""PPD's prompt tokens as they are trained: behind the positions of a text, through all of the model's own frozen layers
(arXiv 2405.18628).

Prompt token i of position t learns the model's own distribution i tokens further along its greedy continuation of the
text up to t. All beginnings of a text are learned from at once, each as far as the text is that continuation.
Divergence and cross-entropy differ by a number that nothing learned changes, so the gradients are those of the paper's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.speculation.heads.ppd import PromptTokens
from phasewise.speculation.heads.ppd_layout import prompt_settings, usual_prompts
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.pseudo_rows import chosen, pseudo_logits
from phasewise.train.heads.target import FrozenTarget, SeenBlock


@dataclass(frozen=True)
class PromptKind:
    """Prompt tokens, as many as depths. They begin as embeddings of the tokens that the texts have most often."""

    every: int = 3  # a position costs as many rows of all layers as there are prompt tokens, forth and back

    @property
    def own_output(self) -> bool:
        return False

    def taps(self, module: PromptTokens) -> tuple[int, ...]:
        return tuple(range(module.layers - 1))

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> PromptTokens:
        if target.model.dtype != torch.float32:
            raise UserError("ppd learns through the model's own layers, which is done in float32 alone: leave out "
                            "--dtype")  # fmt: skip
        return usual_prompts(target.model, depth).to(target.output.device)

    @torch.no_grad()
    def begin(self, module: PromptTokens, target: FrozenTarget, texts: TokenBlock) -> None:
        said = texts.targets[texts.targets >= 0].bincount(minlength=target.vocab)
        frequent = said.argsort(descending=True, stable=True)[: module.depth]
        module.embeddings[: len(frequent)] = target.embed(frequent)

    def vocabulary(self, module: PromptTokens) -> Tensor | None:
        return None

    def guesses(self, module: PromptTokens, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        """Logits after each prompt token in turn, [n, V], where it is learned."""
        places = torch.arange(seen.h.shape[1])[chosen(seen)]
        rows = module().expand(len(seen.h), len(places), -1, -1)
        return pseudo_logits(target, seen, rows, 0)

    def config(self, module: PromptTokens, target: FrozenTarget) -> dict[str, Any]:
        return prompt_settings(module, target.model)

    def tensors(self, module: PromptTokens) -> dict[str, Tensor]:
        return module.state_dict()
