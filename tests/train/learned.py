"""What training lowers, step by step."""

from __future__ import annotations

import torch

from phasewise.train.dense import TokenBlock
from phasewise.train.heads.kinds import HeadsKind
from phasewise.train.heads.run import heads_loss
from phasewise.train.heads.target import FrozenTarget


def lowered(
    kind: HeadsKind, module: torch.nn.Module, target: FrozenTarget, block: TokenBlock, steps: int,
    rate: float = 3e-3, decay: float = 0.01,
) -> list[dict[str, float]]:  # fmt: skip
    """The parts of the loss (nats, but for distances) before each of so many steps of AdamW on one block."""
    adam, found = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=decay), list[dict[str, float]]()
    for step in range(steps):
        loss = heads_loss(kind, module, target, [block], None, step / steps)
        found.append(dict(loss.parts))
        adam.zero_grad()
        loss.total.backward()
        adam.step()
    return found
