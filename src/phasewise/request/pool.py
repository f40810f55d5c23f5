"""The pooled rows of a prompt after the last layer and its norm, for requests that ask for a vector instead of
tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool of the rows before position `upto`: `total` float32 [d] is their sum ("mean") or the prompt's last
    ("last")."""

    upto: int
    total: Tensor
