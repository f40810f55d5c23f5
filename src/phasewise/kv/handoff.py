"""A request's KV on its way from one engine to another: what is sent, over what, and in which state the move is.

    reserved -> sending -> delivered -> owned -> released        (released at once when cancelled, lost or refused)

Until a move is owned its KV stays where it was computed, so that nothing is lost with a message: the request is then
recomputed from its tokens. The receiver sets room aside before anything is sent: for a prompt that is done (pull, so a
full receiver makes the sender wait), or for one that is still computed and travels in pieces (push). Left out:
splitting heads between devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phasewise.kv.buffer import rounded
from phasewise.kv.cache import KV
from phasewise.kv.format import booked
from phasewise.kv.store import Store
from phasewise.kv.wire import Encoded, RowsOrigin
from phasewise.kv.wire import Misfit as Misfit

if TYPE_CHECKING:
    from phasewise.request.request import Request

Header = dict[str, Any]  # plain data: JSON carries it


# ---- the state machine
class State(Enum):
    RESERVED = "room is set aside at the receiver"
    SENDING = "the message is on its way"
    DELIVERED = "the message is there, its rows not yet in the receiver's KV"
    OWNED = "the receiver has the request"
    RELEASED = "it is over, and the sender's KV is free"


_NEXT = {
    State.RESERVED: (State.SENDING, State.RELEASED),
    State.SENDING: (State.DELIVERED, State.OWNED, State.RELEASED),
    State.DELIVERED: (State.OWNED, State.RELEASED),
    State.OWNED: (State.RELEASED,),
    State.RELEASED: (),
}


def advance(state: State, to: State) -> State:
    """The next state of a move, which must be one that may follow."""
    assert to in _NEXT[state], f"a hand-off cannot go from {state.name} to {to.name}"
    return to


# ---- what is sent
def layout(config: object, store: Store) -> str:
    """A hash of all that the bytes of a KV mean: model, shapes, dtypes and the forms rows are kept and travel in."""
    format, form = store.format, store.wire and store.wire.form
    planes = [format.planes(shape) for shape in store.shapes]
    known = repr((config, store.shapes, type(format).__name__, format.exactness, planes, form))
    return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()


class Layouts:
    """The stores of an engine by recipe, each with the layout of its rows."""

    def __init__(self, config: object, stores: Mapping[str, Store]) -> None:
        self._config, self._known = config, dict[str, tuple[Store, str]]()
        self.follow(stores)

    def follow(self, stores: Mapping[str, Store]) -> None:
        """There may be more, or others."""
        self._known = {name: (store, layout(self._config, store)) for name, store in stores.items()}

    def of(self, recipe: str) -> tuple[Store, str]:
        """Raises Misfit for a recipe that is not known here."""
        if recipe not in self._known:
            raise Misfit(f"recipe {recipe!r} is not known here")
        return self._known[recipe]


def exactness(kv: KV) -> str:
    """The exactness of the rows: that of their format, "quantised" by a lossy wire, or "sparse" once some were given
    up."""
    if any(slab.positions is not None for layer in kv.layers for slab in layer.slabs):
        return "sparse"
    return "quantised" if kv.rounded else kv.layers[0].format.exactness


def landing(kv: KV) -> int:
    """Bytes that the rows take where they land, with what is booked for drawers. Blocks whose format is fitted to the
    prompt have that format there too."""
    return kv.drawn + sum(
        rounded(slab.n + 1) * slab.buffer.row
        + booked(
            layer.format if layer.blocks is None else layer.blocks.format, layer.shape, rounded(slab.base + slab.n + 1)
        )
        for layer in kv.layers
        for slab in layer.slabs
    )


def pack(request: Request, layout: str, ticket: int, rows: bool = True) -> tuple[Header, list[Tensor]]:
    """Everything another engine needs to go on with the request: progress, KV in the form in which the store's rows
    travel (but for `rows=False`: they travel in pieces), and drawers of plain data.

    Other drawers stay behind; their methods start again from the tokens, as they do after a preemption. If the wire
    leaves out a suffix of the prompt, the receiver computes it again: to the request, it has not been computed.
    """
    kv = request.kv
    assert kv is not None
    tensors: list[Tensor] = []
    state = {}
    for name, drawer in request.state.items():
        mark = len(tensors)
        try:
            state[name] = _encode(drawer, tensors)
        except Misfit:
            del tensors[mark:]
    progress, tag = request.header(), exactness(kv)
    wire = None if kv.rounded or not rows else kv.wire
    dumped = kv.dump() if rows else []
    encoded = Encoded(dumped) if wire is None else wire.encode(dumped, _origin(request, bool(state)))
    if encoded.rows is not None:
        progress["computed"] = encoded.rows
    header = {
        "ticket": ticket,
        "layout": layout,
        "exactness": "quantised" if encoded.lossy and tag == "true" else tag,
        "rounded": kv.rounded or encoded.lossy,
        "wire": wire is not None,
        "request": progress,
        "kv": _encode(encoded.content, tensors),
        "state": state,
    }
    return header, tensors


def pack_lent(request: Request, layout: str, ticket: int) -> tuple[Header, list[Tensor]]:
    """`pack` for an engine that takes over the memory itself: rows by the names of their buffers."""
    header, tensors = pack(request, layout, ticket, rows=False)
    assert request.kv is not None
    return header | {"kv": _encode(request.kv.dump(lent=True), tensors)}, tensors


def _origin(request: Request, drawers: bool) -> RowsOrigin:
    """Returns what the wire may know of the rows. A suffix may be computed again where that is just what it would be
    after a preemption: of a prompt just completed, with all rows true and at their places and nothing kept beside
    them."""
    kv, trace, end = request.kv, request.trace, request.prompt_len
    assert kv is not None
    plain = all(len(layer.slabs) == 1 and layer.slabs[0].positions is None and layer.n == end for layer in kv.layers)
    seconds = 0.0 if trace.admitted is None or not trace.tokens else trace.tokens[0] - trace.admitted
    return RowsOrigin(plain and request.computed == end and not (drawers or kv.approximate), end - kv.reused, seconds)


def fits(header: Header, store: Store, layout: str) -> None:
    """Raise Misfit unless the rows of a packed request mean here what they meant where they were computed."""
    if header["layout"] != layout:
        raise Misfit(f"the rows have layout {header['layout']}, but here it is {layout}")
    if header["exactness"] not in ("sparse", "quantised" if header["rounded"] else "", store.format.exactness):
        raise Misfit(f"the rows are {header['exactness']}, but here they are {store.format.exactness}")


def drawers(header: Header, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Returns the state that methods keep for a packed request: copies, so that the memory that brought them can be
    freed."""
    return {name: _decode(drawer, tensors, Tensor.clone) for name, drawer in header["state"].items()}


def unpack(header: Header, tensors: Sequence[Tensor], store: Store, layout: str) -> tuple[KV, dict[str, Any]]:
    """The KV, in `store`, and the drawers of a packed request. Raises Misfit, leaving nothing behind."""
    fits(header, store, layout)
    lossy, wire = header["rounded"], store.wire
    if header["wire"] and wire is None:
        raise Misfit("the rows have travelled in a form that is not known here")
    kv = store.made(store.layers(0))
    kv.rounded = lossy
    try:
        content = _decode(header["kv"], tensors)
        kv.load(wire.decode(content) if header["wire"] and wire is not None else content)
        return kv, drawers(header, tensors)
    except Exception as error:
        kv.close()
        raise Misfit(f"the rows cannot be loaded: {error}") from error


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    """Plain data as JSON; tensors are put into `tensors` and named by their place there."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encode(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    raise Misfit(f"{type(value).__name__} is not plain data")


def _decode(value: Any, tensors: Sequence[Tensor], take: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return take(tensors[content])
    if kind == "dict":
        return {_decode(k, tensors, take): _decode(v, tensors, take) for k, v in content}
    items = [_decode(item, tensors, take) for item in content]
    return tuple(items) if kind == "tuple" else items
