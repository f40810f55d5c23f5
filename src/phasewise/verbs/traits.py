"""Traits: the facts that a method declares about itself, as data. The engine reads them; nobody looks for attributes.

A method has one `traits` value, a class attribute or a property of its knobs. A method that holds another one builds
its value from the inner method's with `dataclasses.replace` or `joined`, so that no fact is lost on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

Matches = Literal["all", "point", "none"]
PHASES = ("prefill", "decode")
SHARED = ("attend", "evict", "skip")  # slots of a phase that a method of another verb may fill
MARGIN = 64  # rows of a draft or block beyond a request's text, where a method says nothing else


@dataclass(frozen=True)
class Traits:
    """Facts about one method with its knobs. Each default is what holds for a plain method of any verb."""

    verb: str  # the verb it is chosen by
    name: str = ""  # the name for messages; filled in by whoever writes the message

    # where it acts
    fills: tuple[str, ...] = ()  # slots of a phase that its runtime fills besides its own: attend, evict or skip
    phases: tuple[str, ...] = PHASES  # phases in which an attend, evict or skip method acts; the default acts in others
    asks: tuple[str, ...] = ()  # names in `Params.ask` that it takes; its runtime's `check` sees requests that use them
    launches: bool = False  # place: it has workers, so `--cluster` may place them
    inner: str = ""  # text that messages add to the name, such as `:rest=NAME`: the part that causes a refusal

    # what it does to rows
    own_attention: bool = False  # attend: rows weigh what they see otherwise than dense attention does
    shared_reads: bool = False  # attend: rows of several requests are read at once
    frees_rows: bool = False  # evict: cached rows are given up
    skips_rows: bool = False  # skip: single rows pass layers by
    defers_tokens: bool = False  # skip: skipped tokens re-enter a layer later, beside the only new row of a request
    recomputes: bool = False  # attend: decoded rows are computed once more, from all rows before them
    low_rank: bool = False  # its rows run with low-rank weights
    base_alone: bool = False  # what it was trained with is the base model's KV, which an adapter would change
    packs_blocks: bool = False  # store: finished rows are packed in blocks
    own_wire: bool = False  # store: rows may travel between engines in a form of their own
    ranks_rows: bool = False  # store: blocks are packed by how much attention their rows get

    # scheduling
    decodes_all: bool = False  # schedule: while no prompt is under way, all decodes run in each step, one like another

    # prompts
    whole_prompts: bool = False  # a prompt must come in one piece, whatever rows a scheduler gives
    shares_prefix: bool = True  # rows of its prompts may serve other requests
    plain_prompts: bool = False  # decode: prompts are plain causal slices, so such recipes share cached prefixes
    sparse_prompts: bool = False  # decode: most rows of a prompt are never computed, so none can be asked about
    added_rows: int = 0  # decode: rows that stand for no token, added to every prompt
    injects_kv: bool = False  # decode: its runtime's `given` provides finished KV for rows of a prompt
    retains_kv: bool = False  # decode: finished requests leave their KV for `given`
    accepts_injected: bool = False  # attend, evict, skip: it works on prompts of which rows were injected

    # decoding
    block: int = 1  # decode: rows that see each other and become final together; prefixes are shared in such blocks
    single_rows: bool = False  # decode: one row at a time, once the prompt is computed
    joins_tokens: bool = False  # decode: several tokens may share a row, so that positions go without rows
    unordered: bool = False  # decode: tokens are drawn before those in front of them are known
    margin: int = MARGIN  # decode: rows beyond its text that a request may bring to a step, where more than MARGIN
    brings: tuple[str, ...] = ()  # decode: slots that its runtime's `bring` fills; another method there is refused ...
    composes: tuple[str, ...] = ()  # ... but for these, of which `bring` is given the user's runtime

    # drafting and verification
    drawn: bool = True  # draft: guesses may be drawn, and then have a `q`
    late: bool = False  # draft: one more may come after the pass that judges the others (`Drafter.late`)
    max_nodes: int = MARGIN  # draft: the largest draft
    candidates: int = 0  # draft: `learn` is given so many likeliest tokens after every judged row
    idles: bool = False  # draft: it need not be asked in a step for which each `size` was 0
    learns_across: bool = False  # draft: guesses depend on other requests, so no verifier may let tokens depend on them
    begins_rows: bool = False  # draft: guesses run the model's first layers before they are judged (`FirstLayers`)
    wants: frozenset[str] = frozenset()  # verify: "logits", "hidden" (of `Shown`) or "thoughts" (of `Draft`)
    matches: Matches = "none"  # verify: drafts under which tokens are plain decoding's, random number by random number

    @property
    def slots(self) -> tuple[str, ...]:
        """All verbs whose place it takes, its own first."""
        return (self.verb, *self.fills)

    @property
    def label(self) -> str:
        """Returns the name that messages give it: its verb and its name."""
        return f"{self.verb} {self.name}{self.inner}"

    def acts(self, phase: str) -> bool:
        return phase in self.phases


def joined(outer: Traits, inner: Traits) -> Traits:
    """Traits of a method made of two: `outer`'s verb and name, and every other fact of either. A fact that holds by
    default must hold for both; one that does not, for one of them."""
    found: dict[str, Any] = {}
    for field in fields(Traits):
        a, b = getattr(outer, field.name), getattr(inner, field.name)
        if field.name in ("verb", "name"):
            found[field.name] = a
        elif isinstance(field.default, bool):
            found[field.name] = (a and b) if field.default else (a or b)
        elif isinstance(field.default, int):
            found[field.name] = max(a, b)
        elif isinstance(field.default, tuple) and field.default:
            found[field.name] = tuple(each for each in a if each in b)
        elif isinstance(field.default, tuple):
            found[field.name] = tuple(dict.fromkeys((*a, *b)))
        elif isinstance(field.default, frozenset):
            found[field.name] = a | b
        else:  # texts
            found[field.name] = a if a != field.default else b
    return Traits(**found)
