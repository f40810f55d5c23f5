"""The table of drafters with heads: what each is trained by, and what the laws of `test_trained_drafters.py` ask of it.

A new drafter joins them by an entry. The least of it, for heads of a kind that the trainer knows, is

    TrainedDrafter("name", "method", partial(trained_heads, KINDS["kind"], depth, rate, steps))

It is then held to plain decoding's tokens, with trained heads and random ones, and to what it accepts after prefix hits
and preemption. Each further field adds a law or cases of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from phasewise.speculation.heads.falcon_layout import usual_falcon
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.train.heads.exit import ExitKind
from phasewise.train.heads.falcon import FalconKind, begin
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.target import FrozenTarget
from tests import tiny
from tests.draft.fitted import N, heads, masked_draft, one_pass_heads, trained_heads
from tests.draft.watch import Says, Watch, watched
from tests.speculation.chimera_files import PlainChimera
from tests.speculation.clover_files import PlainClover
from tests.speculation.diffuspec_files import PlainBlock
from tests.speculation.eagle_files import Plain
from tests.speculation.exit_files import tiny_adapter
from tests.speculation.falcon_files import PlainFalcon
from tests.speculation.fspad_files import PlainFspad
from tests.speculation.masked_mtp_files import tiny_masks
from tests.speculation.one_pass_files import PlainPass
from tests.speculation.ppd_files import tiny_prompts
from tests.speculation.transfer_files import tiny_maps

CHAIN, TREE = "depth=3,width=1", "depth=4,width=3,nodes=9"
EVENTS = ("slices", "hand-off", "fork", "mates")
EXACT = ("match", "rejection")
OVER = ({"store": "int8"}, {"evict": "snapkv:keep=0.5,window=4"}, {"attend": "hydragen:rows=16"})
OVER_LATER = (*OVER, {"store": "kivi:group=4,residual=8"})  # where guesses begin in the middle of the model
OVER_ROWS = (*OVER, {"attend": "quest"}, {"evict": "streaming:sinks=2,window=30"},
             {"skip": "unified:speedup=2,weights=none"})  # fmt: skip


@dataclass(frozen=True, eq=False)
class TrainedDrafter:
    """One method of drafting with heads that know what the tiny model writes after `fitted.PROMPTS`."""

    name: str
    method: str
    heads: Callable[[], Path]
    knobs: str = ""  # that all laws have, but for those that name others
    more: tuple[str, ...] = ()  # other knobs with which greedy tokens are plain decoding's
    random: tuple[str, ...] = ("heads=random:0",)  # options under which nothing is known of the text
    steady: str | None = None  # knobs with which guesses follow from the text alone; None: `knobs`

    # how many guesses are right with the trained heads, and with random ones
    accepted: float = N  # more than this, of three prompts
    share: float = 0.0  # and more than this part of all
    passes: int = N  # fewer passes than this are made
    luck: float = 1 / 8  # of guesses of random heads a smaller part is accepted
    one_pass: bool = False  # a draft takes one pass of the heads

    # what is guessed, where that is a chain: as the plain forward of a folder says it
    chain: str = ""
    says: Callable[[Path], Says] | None = None
    tokens: int = 12  # of an answer, whose every draft is compared

    verify: tuple[str, ...] = ("match",)
    events: tuple[str, ...] = ()  # beside prefix hits and preemption
    by_last_pass: bool = False  # what is guessed hangs on the tree of the pass before as well
    kept: int = 5  # where KV is lost on the way, more passes than this stand at the same tokens as alone
    kept_accepted: float = N / 2  # and in these more guesses than this are accepted

    in_pass: bool = False  # guesses, or rows that guess, are among the rows of the model's own passes
    over: tuple[dict[str, str], ...] = ()  # other methods over which it changes nothing
    costs: tuple[tuple[str, int, int], ...] = ()  # knobs; how many rows the largest draft has, at least and at most

    state_bytes: int | None = None  # of a request, beside features and KV of the heads; None: that is not asked

    # what is refused: knobs, and files that `written` puts down with a change
    wrong: tuple[tuple[str, str], ...] = ()
    written: Callable[..., Path] | None = None
    unfit: tuple[tuple[dict[str, Any], str], ...] = ()

    def verbs(self, knobs: str | None = None, source: Path | str = "", **verbs: str) -> dict[str, str]:
        """What to give `tiny.engine`. source: a folder of heads, or random:SEED; "": the trained ones."""
        options = f"heads={source or self.heads()}", self.knobs if knobs is None else knobs
        return {"draft": f"{self.method}:{','.join(filter(None, options))}", **verbs}

    @cache  # noqa: B019  entries live as long as the process
    def alone(self) -> Watch:
        """What happens to each of `fitted.PROMPTS` alone, undisturbed and in one piece."""
        return watched(self.verbs(self.steady))


def step_by_step(plain: type[Plain]) -> Callable[[Path], Says]:
    """Each guess follows from those before it."""

    def of(folder: Path) -> Says:
        forward = plain(folder, tiny.checkpoint())

        def says(text: Sequence[int], n: int) -> list[int]:
            found = list[int]()
            while len(found) < n:
                found.append(int(forward.logits(text, found)[-1].argmax()))
            return found

        return says

    return of


def at_once(guesses: int) -> Callable[[Path], Says]:
    """All guesses come of one pass over a known text and places to fill."""

    def of(folder: Path) -> Says:
        plain = PlainPass(folder, tiny.checkpoint())
        return lambda text, n: plain.logits(text, guesses).argmax(-1).tolist()[:n]

    return of


def filled(folder: Path) -> Says:
    """The same, of as many places as there are guesses."""
    plain = PlainBlock(folder)
    return lambda text, n: plain.logits(text, n).argmax(-1).tolist()


# ---- heads as wide as those that are not trained
def wide(kind: str) -> Callable[[FrozenTarget, int], torch.nn.Module]:
    """What makes random heads of a kind with as many key heads, and as wide an MLP, as the target has."""

    def build(target: FrozenTarget, depth: int) -> torch.nn.Module:
        module, _ = feature_heads(target.model, (kind,), "random:0")
        module.steps = depth
        return module

    return build


@cache
def falcon_heads(k: int) -> Path:
    """Those that guess k tokens a pass."""

    def build(target: FrozenTarget, depth: int) -> torch.nn.Module:
        module = usual_falcon(target.model, guesses=k)
        module.steps = depth
        begin(module, target)
        return module

    return trained_heads(FalconKind(together=k, glance=0.0), 5, 1e-2, 80, build)


# ---- drafters behind features of the target
def no_knob(method: str, *names: str, value: int = 0) -> tuple[tuple[str, str], ...]:
    """Knobs that must be larger, and what is said of each."""
    return tuple((f"{name}={value}", f"{method}: {name}={value}") for name in names)


SIZES = ("depth", "width", "nodes", "chunk")
EAGLE = TrainedDrafter(
    "eagle", "eagle", heads, TREE, (CHAIN,), ("heads=random:0,width=1,depth=3",), share=1 / 8, chain=CHAIN,
    says=step_by_step(Plain), events=EVENTS, kept=24, state_bytes=0, wrong=no_knob("eagle", *SIZES),
)  # fmt: skip
FSPAD = TrainedDrafter(
    "fspad", "fspad", partial(trained_heads, KINDS["fspad"], 4, 1e-2, 80, wide("fspad")), TREE, (CHAIN,),
    ("heads=random:0,width=1,depth=3",), chain=CHAIN, says=step_by_step(PlainFspad), state_bytes=0,
    wrong=no_knob("fspad", *SIZES),
)  # fmt: skip
CHIMERA = TrainedDrafter(
    "chimera", "chimera", partial(trained_heads, KINDS["chimera"], 4, 3e-3, 60, wide("chimera")), TREE,
    (CHAIN, f"{TREE},table=64"), ("heads=random:0,width=1,depth=3",), chain=CHAIN, says=step_by_step(PlainChimera),
    state_bytes=0, wrong=no_knob("chimera", *SIZES, "table", value=-1),
)  # fmt: skip
CLOVER = TrainedDrafter(
    "clover", "clover", partial(trained_heads, KINDS["clover"], 3, 5e-3, 80), "nodes=4,top_p=0.9,floor=0.1",
    ("nodes=3,top_p=0.0",), ("heads=random:0,top_p=0.9",), one_pass=True, chain="nodes=3,top_p=0.0",
    says=step_by_step(PlainClover), events=EVENTS, wrong=(
        ("depth=64", "clover: depth=64 must be from 0 to 63"), ("nodes=64", "clover: nodes=64 must be from 1 to 63"),
        ("top_p=1.5", "clover: top_p=1.5 must be from 0 to 1"), ("floor=-0.1", "clover: floor=-0.1 must be from 0 to"),
        ("chunk=0", "clover: chunk=0 must be at least 1"),
    ),
)  # fmt: skip
FALCON_2 = TrainedDrafter(
    "falcon-2", "falcon", partial(falcon_heads, 2), TREE, ("depth=5,width=1", "depth=4,nodes=9,tree=ranks"),
    ("heads=random:0,width=1,depth=4", "heads=random:0,depth=4,nodes=9,tree=ranks"), chain="depth=5,width=1",
    says=step_by_step(PlainFalcon), events=EVENTS, state_bytes=2 * 2 * 48 * 4, wrong=no_knob("falcon", *SIZES),
)  # fmt: skip
FALCON_3 = TrainedDrafter(
    "falcon-3", "falcon", partial(falcon_heads, 3), TREE, FALCON_2.more, (), chain=FALCON_2.chain,
    says=FALCON_2.says, events=EVENTS,
)  # fmt: skip

# ---- drafts of one pass over places to fill
DFLASH = TrainedDrafter(
    "dflash", "dflash", partial(one_pass_heads, "dflash", 3), CHAIN, ("depth=3,width=3,nodes=7",),
    ("heads=random:0", "heads=random:1,depth=3,width=3"), accepted=N / 2, one_pass=True, chain=CHAIN, says=at_once(3),
    tokens=N, kept=12, wrong=no_knob("dflash", *SIZES),
)  # fmt: skip
PEAGLE = TrainedDrafter(
    "peagle", "eagle", partial(one_pass_heads, "peagle", 3), CHAIN, ("depth=3,width=3,nodes=7",), (), accepted=N / 2,
    one_pass=True, chain=CHAIN, says=at_once(3), tokens=N, kept=12,
)  # fmt: skip
DIFFUSPEC = TrainedDrafter(
    "diffuspec", "diffuspec", masked_draft, "least=2,most=6", ("least=2,most=6,path=argmax", "least=6,most=6"),
    ("heads=random:0", "heads=random:1,lam=0"), steady="least=6,most=6", one_pass=True, verify=EXACT,
)  # fmt: skip
GAD = TrainedDrafter(
    "gad", "gad", masked_draft, "k=4", (), ("heads=random:0",), one_pass=True, chain="k=4", says=filled, tokens=N,
    verify=EXACT, wrong=no_knob("gad", "k", "chunk") + no_knob("gad", "k", value=64),
)  # fmt: skip

# ---- guesses in passes of the model itself
KANGAROO = TrainedDrafter(
    "kangaroo", "kangaroo", partial(trained_heads, ExitKind(exit=2), 1, 1e-2, 80), "depth=4,stop=0.3",
    ("depth=4,stop=0", "depth=6,stop=0.3", "depth=3,stop=1", "depth=1"),
    tuple(f"heads=random:{seed},{knobs}" for seed in (0, 1)
          for knobs in ("depth=4,stop=0", "depth=6,stop=0.3", "depth=3,stop=1", "depth=1")),
    share=1 / 3, luck=1 / 3, verify=EXACT, in_pass=True, over=OVER_LATER,
    wrong=(("depth=0", "depth=0"), ("depth=64", "depth=64"), ("stop=1.5", "stop=1.5"), ("chunk=0", "chunk=0")),
    written=tiny_adapter, unfit=(
        ({"exit": 0}, "exit_layer=0, and the model has 4 layers: it must be from 1 to 3"),
        ({"exit": 4}, "exit_layer=4"),
        ({"exit": "deep"}, "exit_layer='deep' must be a whole number"),
    ),
)  # fmt: skip
HIDDEN_TRANSFER = TrainedDrafter(
    "hidden_transfer", "hidden_transfer", partial(trained_heads, KINDS["hidden_transfer"], 3, 1e-2, 80), "nodes=7",
    ("nodes=15,depth=2", "nodes=1,depth=1", "nodes=40"),
    tuple(f"heads=random:0,{knobs}" for knobs in ("nodes=7", "nodes=15,depth=2", "nodes=1,depth=1", "nodes=40")),
    passes=16, verify=EXACT, kept=2, kept_accepted=2, in_pass=True, over=OVER_LATER,
    wrong=(("nodes=0", "nodes=0"), ("nodes=64", "nodes=64"), ("depth=0", "depth=0"), ("depth=9", "depth=9")),
    written=tiny_maps, unfit=(
        ({"layer": 0}, "transfer_layer=0, and the model has 4 layers: it must be from 1 to 3"),
        ({"layer": 4}, "transfer_layer=4"), ({"layer": "deep"}, "transfer_layer='deep' must be a whole number"),
        ({"maps": 0}, "num_maps=0: there must be at least one map"), ({"num_maps": 4}, "maps.3.weight is absent"),
        ({"d": 32}, "hidden_size=32, the one in .* has 48"),
        ({"speculators_model_type": "medusa"}, "holds heads of kind 'medusa'"),
    ),
)  # fmt: skip
PPD = TrainedDrafter(
    "ppd", "ppd", partial(trained_heads, KINDS["ppd"], 3, 5e-2, 60), "rows=23",
    ("rows=11,depth=2", "rows=2,depth=1", "rows=90"),
    tuple(f"heads=random:0,{knobs}" for knobs in ("rows=23", "rows=11,depth=2", "rows=2,depth=1", "rows=90")),
    accepted=N / 4, verify=EXACT, by_last_pass=True, in_pass=True, over=OVER_ROWS,
    costs=(("rows=23", 1, 23), ("rows=11,depth=2", 1, 11), ("rows=4", 1, 4)),
    wrong=(("rows=3", "rows=3 must be from 4, a guess and 3 prompt tokens, to 127"), ("rows=128", "rows=128"),
           ("depth=0", "depth=0 must be from 1 to 8"), ("depth=9", "depth=9")),
    written=tiny_prompts, unfit=(
        ({"prompts": 0}, "num_prompts=0: there must be at least one prompt token"),
        ({"num_prompts": 4}, r"embeddings is \(3, 48\), and config.json asks for \(4, 48\)"),
        ({"num_prompts": "many"}, "num_prompts='many' must be a whole number"),
        ({"d": 32}, "hidden_size=32, the one in .* has 48"),
        ({"phasewise": {"base": "0123456789abcdef"}}, "were trained for another model"),
        ({"speculators_model_type": "medusa"}, "holds heads of kind 'medusa'"),
    ),
)  # fmt: skip
MASKED_MTP = TrainedDrafter(
    "masked_mtp", "masked_mtp", partial(trained_heads, KINDS["masked_mtp"], 3, 2e-2, 80), "",
    ("depth=1", "masks=linear", "sampler=false,depth=2"),
    tuple(f"heads=random:0{knobs}" for knobs in ("", ",depth=1", ",masks=linear", ",sampler=false,depth=2")),
    accepted=N / 4, verify=EXACT, by_last_pass=True, in_pass=True, over=OVER_ROWS,
    costs=(("", 15, 15), ("depth=2", 8, 8), ("masks=linear", 6, 6), ("depth=1", 3, 3)),
    wrong=(("depth=0", "depth=0 must be from 1 to 8"), ("depth=9", "depth=9"), ("masks=cubic", "cubic")),
    written=tiny_masks, unfit=(
        ({"num_masks": 0}, "num_masks=0 and lora_rank=2: neither may be 0"),
        ({"num_masks": 4}, r"masks is \(3, 48\), and config.json asks for \(4, 48\)"),
        ({"lora_rank": 3}, r"low_rank.0.qkv.a is \(2, 48\), and config.json asks for \(3, 48\)"),
        ({"d": 32}, "hidden_size=32, the one in .* has 48"),
        ({"phasewise": {"base": "0123456789abcdef"}}, "were trained for another model"),
        ({"speculators_model_type": "medusa"}, "holds heads of kind 'medusa'"),
    ),
)  # fmt: skip

DRAFTERS = (
    EAGLE, FSPAD, CHIMERA, CLOVER, FALCON_2, FALCON_3, DFLASH, PEAGLE, DIFFUSPEC, GAD,
    KANGAROO, HIDDEN_TRANSFER, PPD, MASKED_MTP,
)  # fmt: skip
