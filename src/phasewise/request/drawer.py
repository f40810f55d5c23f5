"""Method state of one request (`Request.state`), where plain copies of it would not do."""

from __future__ import annotations

import copy
from typing import Any


class Drawer:
    """The state of one method for one request, which lies in `Request.state` under the method's name.

    Plain data needs no such class: it is copied as a whole at a fork, and forgotten when the request leaves.
    """

    __slots__ = ()

    def fork(self) -> Any:
        """The state of a sibling that goes on from here; None: it makes its own."""
        return copy.deepcopy(self)

    def close(self) -> None:
        """Give up what it holds outside itself: the request leaves, or is preempted."""
