"""What is left of a prompt's rows after the last layer and its norm, for who asks for a vector instead of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pool:
    """Of the rows before position `upto`: `total` float32 [d], their sum ("mean") or the prompt's last ("last")."""

    upto: int
    total: Tensor
