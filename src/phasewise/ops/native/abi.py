"""The structures that native kernels take, field by field, as `kernels.h` declares them and says what they mean.

A field is a word of 64 bits: an `int`, a `float` (a double in C), a `Pointer`, or a structure that lies inline. A
structure keeps alive what its pointers lead to. `mismatch` holds every size and offset against what a compiled library
says of its own structures, so a field that changes on one side only stops the library from being used.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, dataclass_transform

from torch import Tensor

from phasewise.ops.native.levels import WEIGHT_FORMS

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIX = "Struct"  # a class is named as its structure in C, with this behind it

STRUCTURES: dict[str, type[Structure]] = {}


if TYPE_CHECKING:  # type checkers know no metaclass of ctypes

    class _Meta(type): ...

    class _Words: ...

else:
    _Words = ctypes.Structure

    class _Meta(type(ctypes.Structure)):
        """Turns the annotations of a class into the fields of a C structure."""

        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
            annotations = namespace.get("__annotations__", {})
            if name.endswith(SUFFIX):
                body = {key: value for key, value in namespace.items() if key not in annotations}
                fields = [(field, _WORDS.get(kind) or STRUCTURES[kind]) for field, kind in annotations.items()]
                pointers = frozenset(field for field, kind in annotations.items() if kind == "Pointer")
                inline = tuple(field for field, kind in annotations.items() if kind in STRUCTURES)
                namespace = {**body, "_fields_": fields, "_pointers_": pointers, "_inline_": inline, "__slots__": ()}
            made = super().__new__(cls, name, bases, namespace)
            if name.endswith(SUFFIX):
                STRUCTURES[name] = made
            return made


_WORDS = {"int": ctypes.c_int64, "float": ctypes.c_double, "Pointer": ctypes.c_int64}


@dataclass_transform(kw_only_default=True)
class Structure(_Words, metaclass=_Meta):
    """A C structure. Fields that are not given are 0, or null."""

    __slots__ = ("_kept",)
    _pointers_: frozenset[str] = frozenset()
    _inline_: tuple[str, ...] = ()

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            if name in self._pointers_:  # a tensor of one number would pass for that number
                self.point(name, value)
            else:
                setattr(self, name, value)
        for name in self._inline_:
            if name in fields:
                self._keep(fields[name])

    @classmethod
    def byte_count(cls) -> int:
        """Bytes of one structure."""
        return ctypes.sizeof(cls)  # type: ignore[arg-type]

    def point(self, name: str, to: Pointer) -> None:
        """Let a pointer lead to data, which then lives as long as this structure."""
        setattr(self, name, address(to))
        if to is not None and to.__class__ is not int:
            self._keep(to)

    def _keep(self, data: object) -> None:
        try:
            self._kept.append(data)
        except AttributeError:  # the first one
            self._kept: list[object] = [data]

    @property
    def address(self) -> int:
        return ctypes.addressof(self)  # type: ignore[arg-type]


S = TypeVar("S", bound=Structure)


def _array(kind: Any, count: int) -> Any:
    return kind * count


class Structures(Generic[S]):
    """Structures of one kind, one after the other; they keep alive what their pointers lead to.

    An item is a view: setting a number of it changes what the kernels read. Pointers are set by `point`.
    """

    __slots__ = ("_items", "_kept", "address")

    def __init__(self, kind: type[S], items: Iterable[S]) -> None:
        self._kept = list(items)
        self._items: Any = _array(kind, len(self._kept))(*self._kept)
        self.address = ctypes.addressof(self._items) if self._kept else 0

    @classmethod
    def zeros(cls, kind: type[S], count: int) -> Structures[S]:
        """All of them 0; the pointers that are set later keep nothing alive."""
        made = cls.__new__(cls)
        made._kept, made._items = [], _array(kind, count)()
        made.address = ctypes.addressof(made._items)
        return made

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> S:
        item: S = self._items[index]
        return item

    def __iter__(self) -> Iterator[S]:
        return iter(self._items)

    def point(self, index: int, name: str, to: Pointer) -> None:
        """Let a pointer of one of them lead to data, which then lives as long as these do."""
        self._kept[index].point(name, to)
        setattr(self._items[index], name, getattr(self._kept[index], name))


if TYPE_CHECKING:
    Pointer = Tensor | array[int] | array[float] | NDArray[Any] | Structure | Structures[Any] | int | None


def address(of: Pointer) -> int:
    """The address of data; 0 of None, and an address is itself one."""
    if of is None:
        return 0
    if isinstance(of, int):
        return of
    if isinstance(of, Tensor):
        return of.data_ptr()
    if isinstance(of, array):
        return of.buffer_info()[0]
    if isinstance(of, Structure | Structures):
        return of.address
    return int(of.ctypes.data)


def layout() -> dict[str, str]:
    """{name in C: its size, then each field with its offset, in words of a text}, as a library says it; and how many
    forms of weights there are."""
    lie = {name.removesuffix(SUFFIX): _described(kind) for name, kind in STRUCTURES.items()}
    return lie | {"WeightForm": str(len(WEIGHT_FORMS))}


def _described(kind: Any) -> str:
    fields = (f"{field.rstrip('_')} {getattr(kind, field).offset}" for field, *_ in kind._fields_)
    return " ".join((str(ctypes.sizeof(kind)), *fields))


def mismatch(said: str) -> list[str]:
    """Names of structures that lie otherwise in a library, which says one line for each: name, size, fields."""
    theirs = dict(line.split(" ", 1) for line in said.splitlines())
    ours = layout()
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


class RowsStruct(Structure):
    """A matrix whose rows are contiguous."""

    data: Pointer = None
    stride: int = 0
    kind: int = 0


class WeightsPartStruct(Structure):
    """Consecutive outputs of a linear layer that are packed in one form."""

    form: int = 0
    packed: Pointer = None
    scales: Pointer = None
    outputs: int = 0
    whole: float = 0.0


class WeightsStruct(Structure):
    """Packed weights of one linear layer."""

    parts: Pointer = None
    count: int = 0
    bias: Pointer = None
    outputs: int = 0
    inputs: int = 0


class LinearCallStruct(Structure):
    """y = x W^T + bias + add."""

    weights: Pointer = None
    x: RowsStruct = RowsStruct()
    add: RowsStruct = RowsStruct()
    y: RowsStruct = RowsStruct()
    rows: int = 0
    threads: int = 0
    best: Pointer = None
    cap: float = 0.0


class SightStruct(Structure):
    """Which slots before them the rows of a span see."""

    window: int = 0
    sinks: int = 0
    far: Pointer = None
    seats: Pointer = None
    block: int = 0
    bias: Pointer = None


class SealedStruct(Structure):
    """The keys or the values of a span's first slots, quantised in blocks."""

    levels: Pointer = None
    step: Pointer = None
    low: Pointer = None
    levels_head: int = 0
    ends_head: int = 0
    slots: int = 0
    rows: int = 0
    bits: int = 0
    group: int = 0
    left: Pointer = None
    right: Pointer = None
    left_head: int = 0
    right_head: int = 0
    rank: int = 0
    apart: Pointer = None
    places: Pointer = None
    apart_head: int = 0
    aparts: int = 0
    upper: Pointer = None
    scale: Pointer = None
    rest: Pointer = None
    rest_step: Pointer = None
    rest_low: Pointer = None
    rest_bits: int = 0
    rest_rows: int = 0


class SidesStruct(Structure):
    """Keys and values that are quantised in blocks."""

    keys: SealedStruct = SealedStruct()
    values: SealedStruct = SealedStruct()


class SealStruct(Structure):
    """Rows of a layer's keys or values that become blocks."""

    rows: Pointer = None
    row_head: int = 0
    to: SealedStruct = SealedStruct()


class SealCallStruct(Structure):
    """Quantises rows of many layers."""

    seals: Pointer = None
    count: int = 0
    heads: int = 0
    dim: int = 0
    by_channel: int = 0
    threads: int = 0
    slots: int = 0
    rows: int = 0
    blocks: int = 0


class HeadStruct(Structure):
    """One KV head of a span whose heads hold unequally many rows."""

    k: Pointer = None
    v: Pointer = None
    k_scale: Pointer = None
    v_scale: Pointer = None
    begin: int = 0
    window: int = 0
    sinks: int = 0


class PlacesStruct(Structure):
    """Positions of the slots of one KV head."""

    at: Pointer = None
    first: int = 0


class TemperedStruct(Structure):
    """A perturbation of a row's scores before their softmax is recorded."""

    noisy: int = 0
    seed: int = 0
    row: int = 0
    inverse: float = 0.0
    places: Pointer = None


class LineStruct(Structure):
    """The place of one KV head's numbers in a plane of all layers."""

    from_: int = 0
    begin: int = 0
    length: int = 0


class TallyStruct(Structure):
    """The planes in which the attention weights of a span's only row are recorded."""

    lines: Pointer = None
    heads: int = 0
    gone: Pointer = None
    weights: Pointer = None
    scores: Pointer = None
    tempered: Pointer = None
    layer: int = 0


class SpanStruct(Structure):
    """One request's queries, keys and values in one layer."""

    q: Pointer = None
    k: Pointer = None
    v: Pointer = None
    out: Pointer = None
    lse: Pointer = None
    q_row: int = 0
    k_head: int = 0
    k_row: int = 0
    v_head: int = 0
    v_row: int = 0
    n: int = 0
    rows: int = 0
    sees: Pointer = None
    common: int = 0
    k_scale: Pointer = None
    v_scale: Pointer = None
    k_scale_head: int = 0
    v_scale_head: int = 0
    sight: SightStruct = SightStruct()
    first: int = 0
    sealed: Pointer = None
    heads: Pointer = None
    tally: Pointer = None
    shared: Pointer = None
    shared_slots: int = 0


class CommonStruct(Structure):
    """Slots that several spans share and that are read once."""

    spans: Pointer = None
    count: int = 0
    from_: int = 0
    to: int = 0
    level: int = 0


class AttentionCallStruct(Structure):
    """Exact attention of many spans."""

    spans: Pointer = None
    count: int = 0
    heads_q: int = 0
    heads: int = 0
    dim: int = 0
    kind: int = 0
    window: int = 0
    threads: int = 0
    scale: float = 0.0
    commons: Pointer = None
    common_count: int = 0
    softcap: float = 0.0
    sink_scores: Pointer = None


class ListedStruct(Structure):
    """A span whose rows read listed slots only."""

    q: Pointer = None
    k: Pointer = None
    v: Pointer = None
    out: Pointer = None
    q_row: int = 0
    k_head: int = 0
    k_row: int = 0
    v_head: int = 0
    v_row: int = 0
    rows: int = 0
    count: int = 0
    slots: Pointer = None
    k_scale: Pointer = None
    v_scale: Pointer = None
    k_scale_head: int = 0
    v_scale_head: int = 0
    held: Pointer = None
    rest: Pointer = None


class ListedCallStruct(Structure):
    """Attention of many spans over listed slots."""

    spans: Pointer = None
    count: int = 0
    heads_q: int = 0
    heads: int = 0
    dim: int = 0
    kind: int = 0
    threads: int = 0
    scale: float = 0.0


class PagesStruct(Structure):
    """One query row and the bounds of the pages that it chooses among."""

    q: Pointer = None
    low: Pointer = None
    high: Pointer = None
    low_head: int = 0
    high_head: int = 0
    pages: int = 0
    size: int = 0
    chosen: int = 0
    own: int = 0
    n: int = 0
    slots: Pointer = None


class PagesCallStruct(Structure):
    """The choice of pages for many rows."""

    spans: Pointer = None
    count: int = 0
    heads_q: int = 0
    heads: int = 0
    dim: int = 0
    kind: int = 0
    threads: int = 0


class PrefillCallStruct(Structure):
    """Attention of a long slice of a prompt."""

    q: Pointer = None
    k: Pointer = None
    v: Pointer = None
    out: Pointer = None
    q_row: int = 0
    q_head: int = 0
    k_head: int = 0
    k_row: int = 0
    v_head: int = 0
    v_row: int = 0
    n: int = 0
    rows: int = 0
    heads_q: int = 0
    heads: int = 0
    dim: int = 0
    kind: int = 0
    threads: int = 0
    scale: float = 0.0
    k_scale: Pointer = None
    v_scale: Pointer = None
    k_scale_head: int = 0
    v_scale_head: int = 0
    softcap: float = 0.0
    sight: SightStruct = SightStruct()
    sees: Pointer = None
    sees_head: int = 0
    sees_row: int = 0
    lse: Pointer = None
    unequal: Pointer = None
    shared: Pointer = None
    shared_slots: int = 0
    sink_scores: Pointer = None


class NoiseStruct(Structure):
    """Gumbel noise that is added to scores."""

    seeds: Pointer = None
    rows: Pointer = None
    keys: Pointer = None
    keys_head: int = 0
    heads: Pointer = None
    layer: int = 0


class ReceivedCallStruct(Structure):
    """The attention weights that slots receive from many rows."""

    q: Pointer = None
    k: Pointer = None
    out: Pointer = None
    ends: Pointer = None
    q_row: int = 0
    q_head: int = 0
    k_head: int = 0
    k_row: int = 0
    n: int = 0
    rows: int = 0
    heads_q: int = 0
    heads: int = 0
    dim: int = 0
    kind: int = 0
    threads: int = 0
    window: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    lse: Pointer = None
    noise: Pointer = None
    inverse: Pointer = None


class RetireCallStruct(Structure):
    """An update of slots' scores by a row's weights, and the eviction of the lowest."""

    lines: Pointer = None
    count: int = 0
    heads: int = 0
    most: Pointer = None
    scores: Pointer = None
    gone: Pointer = None
    weights: Pointer = None
    together: int = 0
    sums: int = 0
    n: int = 0
    older: int = 0
    threads: int = 0
    places: Pointer = None
    row: int = 0


class NormStruct(Structure):
    """An RMSNorm."""

    weight: Pointer = None
    eps: float = 0.0


class ExpertsStruct(Structure):
    """The experts of one layer."""

    router: Pointer = None
    products: Pointer = None
    count: int = 0
    top: int = 0
    renormalise: int = 0
    loads: Pointer = None


class GateStruct(Structure):
    """What a gated MLP makes of gates and ups."""

    activation: int = 0
    alpha: float = 0.0
    limit: float = 0.0


class LayerStruct(Structure):
    """One decoder layer."""

    before_attention: NormStruct = NormStruct()
    after_attention: NormStruct = NormStruct()
    before_mlp: NormStruct = NormStruct()
    after_mlp: NormStruct = NormStruct()
    heads: NormStruct = NormStruct()
    whole: int = 0
    qkv: Pointer = None
    o: Pointer = None
    gate_up: Pointer = None
    down: Pointer = None
    experts: Pointer = None
    gate: GateStruct = GateStruct()
    turn: int = 0
    window: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    sink_scores: Pointer = None


class TurnStruct(Structure):
    """The cos and sin tables of one kind of rotary positions."""

    cos: Pointer = None
    sin: Pointer = None
    size: int = 0


class EmbeddingsStruct(Structure):
    """The embedding table."""

    packed: Pointer = None
    plain: Pointer = None
    vocab: int = 0
    scale: float = 0.0


class LayerChoiceStruct(Structure):
    """The selection of rows that one layer reads."""

    way: int = 0
    low: Pointer = None
    high: Pointer = None
    head: int = 0
    channels: Pointer = None
    turn: Pointer = None
    turned: int = 0
    line: int = 0
    sums: Pointer = None
    scale: float = 0.0


class ChoiceStruct(Structure):
    """The candidates that a span's only row chooses among."""

    first: int = 0
    units: int = 0
    size: int = 0
    chosen: int = 0
    rule: int = 0
    joint: int = 0
    begin: int = 0
    end: int = 0
    at: int = 0
    each: int = 0
    before: int = 0
    known: int = 0
    step: int = 0
    parts: int = 0
    width: int = 0
    layers: Pointer = None
    queries: Pointer = None
    lists: Pointer = None
    largest: int = 0
    group: int = 0
    beside: Pointer = None


class VotesSpanStruct(Structure):
    """One row that chooses slots, outside a whole step."""

    choice: Pointer = None
    q: Pointer = None
    k: Pointer = None
    k_head: int = 0
    k_row: int = 0
    k_scale: Pointer = None
    k_scale_head: int = 0
    n: int = 0
    slots: Pointer = None
    v: Pointer = None
    v_head: int = 0
    v_row: int = 0
    v_scale: Pointer = None
    v_scale_head: int = 0
    held: Pointer = None
    rest: Pointer = None


class VotesCallStruct(Structure):
    """The choices of many rows."""

    spans: Pointer = None
    count: int = 0
    heads_q: int = 0
    heads: int = 0
    dim: int = 0
    threads: int = 0


class PlanesStruct(Structure):
    """The addresses of a span's keys and values in one layer."""

    k: Pointer = None
    v: Pointer = None
    head: int = 0
    k_scale: Pointer = None
    v_scale: Pointer = None
    scale_head: int = 0


class StackSpanStruct(Structure):
    """One request's rows in a step through all layers."""

    n: int = 0
    rows: int = 0
    sees: Pointer = None
    common: int = 0
    planes: Pointer = None
    done: int = 0
    window: int = 0
    sinks: int = 0
    near: int = 0
    beyond: int = 0
    seats: Pointer = None
    block: int = 0
    first: int = 0
    choice: Pointer = None
    sealed: Pointer = None
    unequal: Pointer = None
    tally: Pointer = None
    bias: Pointer = None
    shared: Pointer = None
    shared_slots: int = 0


class LowRankStruct(Structure):
    """Low-rank weights of one linear layer."""

    down: Pointer = None
    up: Pointer = None


class TunedStruct(Structure):
    """Rows that run with low-rank weights."""

    from_: int = 0
    to: int = 0
    layers: Pointer = None


class StackCallStruct(Structure):
    """Embeddings and some layers of a decoder."""

    layers: Pointer = None
    embeddings: Pointer = None
    count: int = 0
    hidden: int = 0
    heads_q: int = 0
    heads: int = 0
    dim: int = 0
    x: Pointer = None
    rows: int = 0
    threads: int = 0
    turns: Pointer = None
    tokens: Pointer = None
    positions: Pointer = None
    spans: Pointer = None
    span_count: int = 0
    commons: Pointer = None
    common_count: int = 0
    from_: int = 0
    to: int = 0
    qkv: Pointer = None
    read: Pointer = None
    far: Pointer = None
    tuned: Pointer = None
    tuned_count: int = 0


class HeadCallStruct(Structure):
    """The head of a language model."""

    weights: Pointer = None
    norm: NormStruct = NormStruct()
    cap: float = 0.0
    x: Pointer = None
    x_row: int = 0
    rows: int = 0
    threads: int = 0
    logits: Pointer = None
    best: Pointer = None
    masks: Pointer = None


class SuffixesStruct(Structure):
    """A suffix automaton."""

    link: Pointer = None
    length: Pointer = None
    end: Pointer = None
    first: Pointer = None
    followers: Pointer = None
    from_: Pointer = None
    token: Pointer = None
    target: Pointer = None
    next: Pointer = None
    table: Pointer = None
    mask: int = 0
    states: int = 0
    edges: int = 0
    last: int = 0
    n: int = 0


class ChainStruct(Structure):
    """A request for the tokens that follow the end of a text."""

    most: int = 0
    shortest: int = 0
    least: float = 0.0
    only: Pointer = None
    latest: Pointer = None
    onlys: int = 0
    latests: int = 0
    tokens: Pointer = None
    likely: Pointer = None
