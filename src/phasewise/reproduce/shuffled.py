"""ZipCache and ZipVL, with rows in more bits and in fewer, without their ideas: see `controls.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.kv.format import RowFormat
from phasewise.methods.store.zipcache import Saliency, ZipCache
from phasewise.methods.store.zipvl import Marking, Mixed, MixedZipVL
from phasewise.reproduce.controls import Control, drawn
from phasewise.request.request import Request
from phasewise.step.read import Read
from phasewise.verbs.host import Host
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class PermutedClasses(Control, Storing):
    """store, evict: as many rows in either class as ZipCache has, but how much they matter is shuffled among them."""

    of: ZipCache

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def format(self) -> RowFormat:
        return self.of.format()

    def bind(self, host: Host) -> _Shuffled:
        return _Shuffled(self.of, host.model.config)


class _Shuffled(Saliency):
    def saliency(self, request: Request, layer: int, start: int, stop: int) -> Tensor:
        marks = super().saliency(request, layer, start, stop)
        return marks[torch.randperm(len(marks), generator=drawn(request.prompt[-8:], layer, start)).to(marks.device)]


@dataclass(frozen=True)
class RandomMixed(Control, Storing):
    """store, attend, evict: as many tokens per layer as ZipVL finds important are read and kept in more bits, the
    prompt's last ones among them, the others drawn at random."""

    of: MixedZipVL

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def format(self) -> RowFormat:
        return self.of.format()

    def bind(self, host: Host) -> Mixed:
        return Mixed(self.of, host.model.config, _RandomMarking(self.of.important, host.model.config.attention))


class _RandomMarking(Marking):
    def ranked(self, normalised: Tensor, read: Read) -> Tensor:
        return torch.rand(len(normalised), generator=drawn(read.span.request.prompt[-8:], len(normalised), read.layer))
