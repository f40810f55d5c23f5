"""store: in what form is KV kept, shared and shipped?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasewise.kv.format import KVShape, RowFormat
    from phasewise.kv.tiers.codec import BlockCodec, BlockLayout
    from phasewise.kv.wire import Wire
    from phasewise.verbs.host import Host


class Storing(ABC):
    """store: in what form is KV kept, shared and shipped? kv/format.py describes the forms: of
    rows, and of blocks of finished rows."""

    @abstractmethod
    def format(self) -> RowFormat:
        """The form in which rows are kept."""

    def wire(self, shapes: Sequence[KVShape], unit: int) -> Wire | None:
        """The form in which rows leave for other engines, of engines with these layers that compute prompts in blocks
        of `unit` rows; None: as they are kept."""
        return None

    def blocks(self, host: Host, shapes: Sequence[KVShape], layout: BlockLayout) -> BlockCodec | None:
        """The form in which prefix blocks of this layout are written to disk; None: as they are kept. Raises UserError
        where what it needs of the model is not there."""
        return None
