"""A draft in parts, behind each of which a guess may leave: the deeper parts catch up when a guess goes there.

```
 guess            g1      g2      g3       g1 and g2 leave behind part 1, g3 behind part 2
 part 1           g1      g2      g3       a row each
 waiting          g1      g1 g2   -        rows that part 1 has left and part 2 has not read
 part 2                           g1 g2 g3 one pass: g3 reads keys and values of all before it
```

The keys and values of every part are those of a pass through all parts, whenever they are computed. So at which part a
guess leaves, and what is guessed, hangs on the text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.request.drawer import Drawer
from phasewise.speculation.companion import Companion, NewNodes, SecondModelKV

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.request import Request

MOST_WAITING = 64  # rows of a request before a part; with more of them it runs though no guess goes there


class WaitingRows(Drawer):
    """Rows [n, d] of one request that have left a part and have not entered the next, by the part that they have
    left."""

    def __init__(self, boundaries: int) -> None:
        self.rows: list[list[Tensor]] = [[] for _ in range(boundaries)]  # [d] each

    def fork(self) -> WaitingRows:
        twin = WaitingRows(len(self.rows))
        twin.rows = [[*each] for each in self.rows]
        return twin


class Part(Companion):
    """Some layers of the draft, with KV of their own. All rows that it computes are committed at once, those of guesses
    as well, and `cut` drops those that do not hold."""

    def rows(self, request: Request) -> int:
        follower: SecondModelKV | None = request.state.get(self.name)
        return 0 if follower is None else follower.rows

    def cut(self, request: Request, rows: int) -> None:
        """Keeps the first `rows` rows of a request at most."""
        follower: SecondModelKV | None = request.state.get(self.name)
        if follower is None or follower.rows <= rows:
            return
        follower.kv.drop_last(rows)
        follower.tail = follower.tail[: max(0, rows - follower.base)]
        follower.base = min(follower.base, rows)

    def take(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], given: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Rows [n, d] after its last layer of the next tokens of each request. `given`: the rows [n, d] that enter its
        first layer in their place. One pass."""
        spans = []
        for number, (request, own) in enumerate(zip(requests, tokens, strict=True)):
            start = self.rows(request)
            span = self._span(request, self._follower(request, start + len(own)), start, own)
            if given is not None:
                span.given = span.hidden = given[number]
            spans.append(span)
        x = self._committed(spans).x
        for span in spans:
            follower: SecondModelKV = span.request.state[self.name]
            follower.tail += span.tokens
        return [x[span.slice] for span in spans]

    def settle(self, request: Request, rows: int) -> None:
        """The tokens of the first `rows` rows will never be others."""
        follower: SecondModelKV = request.state[self.name]
        follower.tail = follower.tail[max(0, rows - follower.base) :]
        follower.base = max(follower.base, rows)


class NestedDraft:
    """The parts, as what a drafter grows its chains with (`DraftBackend`). `taus`: of each part but the last, the
    probability above which a guess leaves behind it."""

    def __init__(self, parts: Sequence[Part], taus: Sequence[float]) -> None:
        assert len(taus) == len(parts) - 1
        self.parts, self.taus = parts, taus
        self.first = parts[0]
        self.text: Callable[[Request], Sequence[int]] = lambda request: request.tokens
        self._name = f"{self.first.name} waiting"
        self._said: tuple[Tensor, Tensor] | None = None  # rows, and the logits that chose where they left

    @property
    def model(self) -> Model:
        """The first part; norm and head are those of all."""
        return self.first.model

    @property
    def optional(self) -> Callable[[Request], bool]:
        return self.first.optional

    @optional.setter
    def optional(self, optional: Callable[[Request], bool]) -> None:
        for part in self.parts:
            part.optional = optional

    def lag(self, request: Request) -> int:
        return self.first.lag(request)

    def reserve(self, request: Request, rows: int) -> bool:
        return all(part.reserve(request, rows) for part in self.parts)

    def catch_up(self, requests: Sequence[Request], most: int) -> None:
        """Compute the next tokens of requests that lag behind, in all parts: at most `most` of each and never the last
        known one."""
        starts = [self._start(request) for request in requests]
        texts = [
            request.tokens[start : min(start + most, request.known - 1)] for request, start in zip(requests, starts)
        ]
        self._leave(0, requests, self.first.take(requests, texts))
        for request in requests:
            self.first.settle(request, self.first.rows(request))
        for number in range(1, len(self.parts)):
            self._enter(number, requests)

    def root(self, requests: Sequence[Request]) -> Tensor:
        """Rows [n, d] after each request's text, by the part where what follows leaves."""
        starts = [self._start(request) for request in requests]
        x = self.first.take(requests, [request.tokens[start:] for request, start in zip(requests, starts)])
        for request in requests:
            self.first.settle(request, request.known - 1)
        return self._deepened(requests, x)

    def grow(self, levels: Sequence[NewNodes]) -> Tensor:
        """Rows [n, d] after one more token of each request's chain, likewise."""
        assert all(len(level.tokens) == 1 for level in levels), "drafts are chains"
        requests = [level.request for level in levels]
        return self._deepened(requests, self.first.take(requests, [level.tokens for level in levels]))

    def logits(self, x: Tensor) -> Tensor:
        """Logits float32 [n, V] of what `root` or `grow` has given."""
        said, self._said = self._said, None
        return said[1] if said is not None and said[0] is x else self.model.head(x)

    # ---- depth
    def _deepened(self, requests: Sequence[Request], each: Sequence[Tensor]) -> Tensor:
        """The last rows of each request [n, d] where they leave. `each`: rows that the first part has made."""
        self._leave(0, requests, each)
        x = torch.stack([rows[-1] for rows in each])
        if not self.taus:
            return x
        logits, going = self.model.head(x), list(range(len(requests)))
        for number, tau in enumerate(self.taus, 1):
            going = [i for i, sure in zip(going, _surest(logits, going)) if sure <= tau]
            full = [i for i, request in enumerate(requests) if self._waits(request, number - 1) > MOST_WAITING]
            those = sorted({*going, *full})
            rows = dict(zip(those, self._enter(number, [requests[i] for i in those])))
            if going:
                index, deeper = torch.tensor(going, device=x.device), torch.stack([rows[i] for i in going])
                x = x.index_copy(0, index, deeper)
                logits = logits.index_copy(0, index, self.model.head(deeper))
        self._said = x, logits
        return x

    def _enter(self, number: int, requests: Sequence[Request]) -> list[Tensor]:
        """Run part `number` over all rows that wait before it. -> the last row [d] of each request"""
        if not requests:
            return []
        given = [torch.stack(self._waiting(request).rows[number - 1]) for request in requests]
        each = self.parts[number].take(requests, [[0] * len(rows) for rows in given], given)
        for request in requests:
            self.parts[number].settle(request, self.parts[number].rows(request))
            self._waiting(request).rows[number - 1] = []
        self._leave(number, requests, each)
        return [rows[-1] for rows in each]

    def _leave(self, number: int, requests: Sequence[Request], each: Sequence[Tensor]) -> None:
        """Rows have left part `number`, and wait before the next if there is one."""
        if number < len(self.taus):
            for request, rows in zip(requests, each):
                self._waiting(request).rows[number] += rows.clone().unbind()

    # ---- what is held of a request
    def _waiting(self, request: Request) -> WaitingRows:
        found: WaitingRows | None = request.state.get(self._name)
        if found is None:
            found = request.state[self._name] = WaitingRows(len(self.taus))
        return found

    def _waits(self, request: Request, number: int) -> int:
        return len(self._waiting(request).rows[number])

    def _start(self, request: Request) -> int:
        """Drops what does not hold for the request's text any more, in every part and of what waits. -> rows that are
        left, fewer than it has tokens"""
        start = min(request.known - self.first.lag(request), request.known - 1)
        held = [part.rows(request) for part in self.parts]
        if any(held[i] != held[i + 1] + self._waits(request, i) for i in range(len(self.taus))):
            self._forget(request)  # a pass was broken off
            return 0
        for part in self.parts:
            part.cut(request, start)
        for number, rows in enumerate(self._waiting(request).rows):
            del rows[max(0, start - self.parts[number + 1].rows(request)) :]
        return start

    def _forget(self, request: Request) -> None:
        for part in self.parts:
            part.forget(request)
        request.state.pop(self._name, None)


def _surest(logits: Tensor, some: Sequence[int]) -> list[float]:
    """The largest probability of each of these rows of logits [n, V], before any rule of the request."""
    if not some:
        return []
    chances: list[float] = logits[some].softmax(-1).amax(-1).tolist()
    return chances
