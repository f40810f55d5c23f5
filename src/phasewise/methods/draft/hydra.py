"""Medusa's heads that also read the tokens guessed before their own (Hydra, arXiv 2402.05109): exact under every
verifier that keeps chosen guesses exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.methods.draft._rank_tree import RankTree
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.heads.hydra import HydraHeads
from phasewise.speculation.heads.last_state import LastStateDrafter, LastStateHeads, loaded
from phasewise.speculation.heads.layouts import prefix_layer
from phasewise.speculation.prefixed import PrefixedDrafter
from phasewise.verbs.host import Host


@dataclass(frozen=True)
class Hydra(RankTree):
    """A fixed tree of at most `nodes` guesses, level by level: each head reads the model's last state and the
    embeddings of the path to its guess, so later guesses fit the earlier ones.

    A level is one product with the output matrix, for all paths of all requests. Which ranks the tree holds follows
    from how often each was right on held-out text, as measured in training. `heads`: `auto` (phasewise/heads/hydra
    beside the model, else what ships for it), a folder, or random:SEED, which guesses nothing. Folders are those of
    `phasewise train heads hydra`, or what `phasewise convert heads` makes of Hydra's own files. Hydra++ has a prefix
    layer: one decoder layer over the model's last states, whose output is read in place of the last one. A folder that
    has one (`prefix_layer.*`) brings it along; it takes one row a token, with keys and values in the request's budget.
    """

    paper: ClassVar[str] = "arXiv 2402.05109"
    kind: ClassVar[type[LastStateHeads]] = HydraHeads

    def bind(self, host: Host) -> LastStateDrafter:
        made, tree, stored = loaded(host.model, self.kind, self.heads, self.nodes)
        prefix = None if stored is None else prefix_layer(stored, host.model)
        if prefix is None:
            return LastStateDrafter(host, made, tree)
        return PrefixedDrafter(host, made, tree, FeatureModel(prefix[0], host.model, prefix[1]))
