"""The transfer buffer of a Ray cluster: a parcel is an object in shared memory on its worker's host, fetched by whoever
picks it up.

A parcel holds a reference, so it travels in Ray's own messages, not in JSON, and lives as long as somebody holds one:
dropping means forgetting. Ray lets the process that made an object own it, and frees what a dead process owned. So,
other than a segment (transfer_buffer.py), a parcel dies with the worker that put it down, and `get` raises Lost: the
request is computed again from its tokens. (`ray.put` had an argument to let another actor own an object; Ray 2.56
removed it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from phasewise.cluster.transfer_buffer import Lost, Parcel

PATIENCE = 60.0  # seconds for a parcel to cross the network; it is lost then


class RayBuffer:
    """Ray's object store: what a worker puts down goes to the memory of its host, and from there to where it is got."""

    def put(self, tensors: Sequence[Tensor]) -> Parcel:
        kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        try:
            return {"object": ray.put([_bytes_of(tensor) for tensor in tensors]), "tensors": kinds}
        except RayError as error:
            raise OSError(f"the object store takes no more: {error}") from error

    def here(self, parcels: Sequence[Parcel], seconds: float) -> bool:
        """Start to fetch them all; whether one of them is here, or lost, within so many seconds."""
        return bool(ray.wait([parcel["object"] for parcel in parcels], timeout=seconds)[0])

    def get(self, parcel: Parcel) -> list[Tensor]:
        try:
            arrays = ray.get(parcel["object"], timeout=PATIENCE)
        except RayError as error:
            raise Lost(f"the object of a parcel is gone: {type(error).__name__}") from error
        return [_tensor_of(array, *kind) for array, kind in zip(arrays, parcel["tensors"])]

    def drop(self, parcel: Parcel) -> None:
        pass  # the last reference is on its way out

    def clear(self, owner: str, keep: Sequence[Parcel]) -> None:
        pass  # Ray has


def _bytes_of(tensor: Tensor) -> Any:
    """View a tensor as an array of bytes, which Ray copies to shared memory once, whatever the dtype."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _tensor_of(array: Any, kind: str, shape: Sequence[int]) -> Tensor:
    """A view of shared memory, to be read only."""
    return torch.from_numpy(array).view(getattr(torch, kind)).view(list(shape))
