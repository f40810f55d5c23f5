"""Requests made of plain data, which another engine has sent (`Request.header`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phasewise.request.params import SLO, Params
from phasewise.request.request import Request


def request_of(header: dict[str, Any], watch: Callable[[int], bool] | None = None) -> Request:
    """The request of a header, which may have travelled as JSON (keys become text there, tuples lists)."""
    params = dict(header["params"])
    params["stop_tokens"] = tuple(params["stop_tokens"])
    params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    request = Request(
        header["tokens"],
        Params(**params),
        id=header["id"],
        slo=SLO(*header["slo"]),
        watch=watch,
        recipe=header["recipe"],
    )
    request.trace.arrived = header["arrived"]
    request.prompt_len = header["prompt_len"]
    request.computed = header["computed"]
    request.high_water = header["high_water"]
    request.groups = list(header["groups"])
    for at, count in header["emitted"]:
        request.trace.emitted(at, count)
    return request
