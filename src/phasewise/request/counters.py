"""Counters of work done, none of which depends on the machine's speed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

OF_REQUESTS = ("rows", "drafted", "accepted", "prefix_hits", "recomputed", "preemptions")  # also counted by recipe


@dataclass(slots=True)
class Counters:
    """Work done since start. None of these depend on the machine's speed, so tests and comparisons may rely on them."""

    steps: int = 0
    forwards: int = 0  # passes of the target model; two where a step takes both ways through it (forward.py)
    draft_forwards: int = 0  # passes of companion models (draft, amateur, ...), and of the model itself in tails
    draft_depth: int = 0  # attentions of these passes that had to wait for one another
    rows: int = 0  # token rows that entered the target model's first layer
    prompt_rows: int = 0  # of these, rows of prompts that were not done
    row_layers: int = 0  # (row, layer) pairs of the target model; half a pair where one half of the layer runs
    head_rows: int = 0  # rows that went through the language-model head
    kv_bytes_read: int = 0
    kv_bytes_written: int = 0
    kv_bytes_moved: int = 0  # copies: compaction, copy-on-write, prefix reuse, hand-off
    choices: int = 0  # lists made of what a row reads in a layer, where a method may use them again
    drafted: int = 0  # draft nodes verified
    accepted: int = 0  # draft nodes accepted
    forced: int = 0  # of both, tokens that were sure beforehand (`Sample.sure`)
    expert_loads: int = 0  # distinct experts used, summed over (forward, layer)
    prefix_hits: int = 0  # prompt rows taken from the prefix cache
    recalled: int = 0  # prompt rows that were given: from KV that earlier requests left, or another model's
    recomputed: int = 0  # rows computed again after a preemption or a lost hand-off
    preemptions: int = 0
    handoffs: int = 0
    kv_bytes_sent: int = 0  # KV put down for other workers ...
    kv_bytes_exposed: int = 0  # ... of these, once its prompt was done: what the second token waits for
    link_bytes: int = 0  # that would cross a link to where KV is held (a drive, a host), where a method models one
    push_fallbacks: int = 0  # requests whose KV was to travel while their prompt was computed, and did not
    restarts: int = 0  # requests started again from their tokens, for a lost worker or a lost hand-off
    workers_lost: int = 0
    emitted: int = 0  # tokens given to requests

    def count(self, name: str, n: int) -> None:
        setattr(self, name, getattr(self, name) + n)

    def of_requests(self) -> dict[str, int]:
        """Those that belong to single requests; passes of the model and their bytes are all requests' together."""
        return {name: getattr(self, name) for name in OF_REQUESTS}

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __add__(self, other: Counters) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: Counters) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})
