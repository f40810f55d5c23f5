"""Trees of a recurrent block that guesses several tokens a pass, and goes on from these (Falcon, arXiv 2412.12639)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from phasewise.errors import UserError
from phasewise.methods.draft._feature_tree import FeatureTree
from phasewise.methods.draft._fixed_ranks import FixedRanks
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.group_drafter import GroupDrafter, group_drafter
from phasewise.speculation.heads.last_state import UNMEASURED, accuracy_of, rank_tree
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.speculation.tree_drafter import TreeShape
from phasewise.verbs.host import Host

TreeKind = Literal["likeliest", "ranks"]


@dataclass(frozen=True)
class Falcon(FeatureTree):
    """Guesses by Falcon's heads, k of them in each pass of the heads; k is said by the heads, mostly 2. An LSTM turns
    states and tokens into rows, and a block reads them in groups of k, in which every row sees all. The next pass reads
    the k guesses and the k features of the pass before. So `depth` levels take depth / k passes, rounded up.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder, with the authors' names
    of tensors or in the manner of vLLM's `speculators`; or `random:SEED`.

    `tree=ranks` is the paper's: a fixed tree of the `nodes` rank paths that were right most often in training, whatever
    the heads hold likely. `tree=likeliest` is EAGLE-2's, as `draft.eagle` has it, with `width`. Guesses are chosen, not
    drawn. Before a text has k + 1 tokens nothing is guessed.
    """

    tree: TreeKind = "likeliest"

    paper: ClassVar[str] = "arXiv 2412.12639"
    name: ClassVar[str] = "falcon"
    kinds: ClassVar[tuple[str, ...]] = ("falcon",)
    tight: ClassVar[dict[str, object]] = {"depth": 3, "width": 2, "nodes": 5}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree not in get_args(TreeKind):
            raise UserError(f"falcon: tree={self.tree!r}: choose one of {', '.join(get_args(TreeKind))}")

    def bind(self, host: Host) -> GroupDrafter:
        heads, key = feature_heads(host.model, self.kinds, self.heads)
        shape: TreeShape = self.shape if self.tree == "likeliest" else self._ranks(host)
        return group_drafter(host, self.name, FeatureModel(heads, host.model, key), shape, self.chunk)

    def _ranks(self, host: Host) -> FixedRanks:
        """The fixed tree of the heads. Raises UserError for more levels than their ranks were measured for."""
        accuracy = [UNMEASURED] * self.depth
        if folder.seed_of(self.heads) is None:
            stored = folder.read(folder.locate(host.model, self.kinds, self.heads))
            measured = stored.own.get("accuracy")
            levels = len(measured) if isinstance(measured, list) else self.depth
            if levels < self.depth:
                raise UserError(f"falcon: depth={self.depth},tree=ranks: the heads in {stored.path} were measured for "
                                f"{levels} guesses in a row. Choose depth={levels} or tree=likeliest")  # fmt: skip
            accuracy = [tuple(row) for row in accuracy_of(stored, levels)[: self.depth]]
        return FixedRanks(rank_tree(accuracy, self.nodes))
