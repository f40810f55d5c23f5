"""The router's view of a worker, in numbers, by which policies choose."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from phasewise.child import Message
from phasewise.cluster.launcher import Connection, WorkerSpec
from phasewise.kv.prefix import BLOCK, chain

REMEMBERED = 8192  # blocks of prompts that a worker is taken to have cached


class WorkerHandle:
    """A worker's line, its role, what it last said of itself, and what it was given since."""

    def __init__(self, connection: Connection, spec: WorkerSpec, now: float) -> None:
        self.connection, self.spec = connection, spec
        self.name, self.role = connection.name, spec.role
        self.state: dict[str, Any] = {}
        self.told = 0  # the number of the last command
        self.heard_at = now  # when it last said anything
        self.prefilling = 0  # prompt tokens it was given and has not finished
        self.generating = 0  # tokens of the requests that generate here or are on their way here, as far as reported
        self.promised = 0  # bytes of KV on their way here
        self.coming = 0  # requests on their way here
        self.shape = b""  # of the prompt that is being placed: the key under which its prefixes are cached
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    @property
    def quiet(self) -> bool:
        """It has heard its last command, and no KV waits there to be taken over."""
        return bool(self.told == self.state.get("heard", 0) and not self.state.get("arrivals"))

    @property
    def decoding(self) -> int:
        """Tokens of the requests that generate here or are on their way here, with those it has yet to report."""
        return self.generating + int(self.state.get("untold", 0))

    @property
    def free(self) -> int:
        """Bytes of its KV budget that are neither in use nor promised; unused prefixes count as free."""
        return int(self.state.get("free", 0)) - self.promised

    def tell(self, command: Message) -> None:
        self.told += 1
        self.connection.tell(command | {"n": self.told})

    # ---- prefixes, as far as the router can guess them
    def cached(self, tokens: Sequence[int]) -> int:
        """Tokens at the start of a prompt that it has probably cached."""
        if not self._blocks:
            return 0
        found = 0
        for key in _keys(self.shape, tokens):
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            found += BLOCK
        return found

    def remember(self, tokens: Sequence[int], shape: bytes = b"") -> None:
        """It was given a prompt."""
        for key in _keys(shape, tokens):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > REMEMBERED:
            self._blocks.popitem(last=False)

    def forget_prefixes(self) -> None:
        self._blocks.clear()


def _keys(shape: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    key = shape
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = chain(key, tokens[start : start + BLOCK])
        yield key
