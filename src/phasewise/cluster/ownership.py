"""Hand-offs between workers of a pool: memory stays where it is and changes hands (arXiv 2504.19867).

    offer   the prompt's worker gives its buffers up; their bytes are a loan in the pool's table, and nobody's
    take    the next worker makes the loan its own, then the buffers; only then does it go on
    drop    whoever comes first, sender or router, frees what was not taken; nothing happens to what was

The rows are never copied, but for those that siblings of the request still read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phasewise.cluster.pool import Account
from phasewise.cluster.shared_pool import SharedPool
from phasewise.cluster.transfer_buffer import Parcel, TransferBuffer
from phasewise.kv.cache import KV
from phasewise.kv.handoff import Header, Layouts, pack_lent, unpack

if TYPE_CHECKING:
    from phasewise.engine.engine import Engine
    from phasewise.request.request import Request


class OwnershipBuffer:
    """A transfer buffer whose parcels may name a loan of a pool, beside the tensors they carry: {"rest", "loan"?}."""

    def __init__(self, transfer_buffer: TransferBuffer, pool: SharedPool) -> None:
        self.transfer_buffer, self.pool = transfer_buffer, pool

    def put(self, tensors: Sequence[Tensor]) -> Parcel:
        return {"rest": self.transfer_buffer.put(tensors) if tensors else None}

    def get(self, parcel: Parcel) -> list[Tensor]:
        return self.transfer_buffer.get(parcel["rest"]) if parcel["rest"] else []

    def drop(self, parcel: Parcel) -> None:
        if parcel["rest"]:
            self.transfer_buffer.drop(parcel["rest"])
        if "loan" in parcel:
            self.pool.drop(parcel["loan"])

    def clear(self, owner: str, keep: Sequence[Parcel]) -> None:
        self.transfer_buffer.clear(owner, [parcel["rest"] for parcel in keep if parcel["rest"]])
        self.pool.clear(owner, [parcel["loan"] for parcel in keep if "loan" in parcel])


class OwnershipTransfer:
    """A worker's use of its engine's account in a pool: it balances memory, lends KV and adopts it."""

    def __init__(self, engine: Engine, account: Account, transfer_buffer: TransferBuffer, layouts: Layouts) -> None:
        self.engine, self.account, self.transfer_buffer = engine, account, transfer_buffer
        self._layouts = layouts

    @classmethod
    def of(cls, engine: Engine, transfer_buffer: TransferBuffer, layouts: Layouts) -> OwnershipTransfer | None:
        """None if the engine has a budget of its own."""
        account = engine.ledger
        return cls(engine, account, transfer_buffer, layouts) if isinstance(account, Account) else None

    # ---- memory
    def balance(self) -> None:
        """Keep what the engine's requests need to grow, and the first that waits to start; let go of the rest."""
        self.account.settle(self._headroom())
        if self.account.wish and self.engine.prefixes.shrink(self.account.wish):
            self.account.settle(self._headroom())

    def _headroom(self) -> int:
        if self.account.yields:
            return 0
        engine, needs, grow = self.engine, dict[tuple[str, int], int](), 0
        for request in engine.running:
            if request.kv is None:
                continue
            key = request.recipe, max(1, request.rows)
            if key not in needs:  # most bring as many rows as another
                needs[key] = engine.runtime(request).need(key[1])
            grow += max(needs[key], request.kv.growth(key[1]))
        return grow + sum(engine.runtime(request).need(request.known + 1) for request in engine.waiting[:1])

    def spare(self, n_bytes: int) -> None:
        """Give up unused prefixes for somebody else."""
        self.engine.prefixes.shrink(n_bytes)

    # ---- handing on
    def fits(self, request: Request) -> bool:
        """Returns whether there is room for the rows that siblings no longer share with it."""
        assert request.kv is not None
        return self.engine.prefixes.room(request.kv.shared)

    def put(self, request: Request, attempt: int) -> tuple[Header, Parcel]:
        """Give a request's KV up for another worker to take."""
        kv = request.kv
        assert kv is not None
        kv.rewrite()  # the values that it would have here: they change no more
        kv.unshare()
        packed, tensors = pack_lent(request, self._layouts.of(request.recipe)[1], attempt)
        parcel = self.transfer_buffer.put(tensors)
        try:
            parcel["loan"] = self.account.lend(kv)
        except Exception:
            self.transfer_buffer.drop(parcel)
            raise
        return packed, parcel

    def take(self, packed: Header, parcel: Parcel) -> tuple[KV, dict[str, Any]]:
        """The KV and the drawers of a request that another worker has given up. Raises if they are gone."""
        tensors = self.transfer_buffer.get(parcel)
        self.account.adopt(parcel["loan"])
        return unpack(packed, tensors, *self._layouts.of(packed["request"]["recipe"]))

    def welcome(self) -> bool:
        """Returns whether one more may run. It brings its memory along, which a lone request may need to grow."""
        running = len(self.engine.running)
        return running < self.engine.parts.max_running or (running == 1 and self.account.wish > 0)
