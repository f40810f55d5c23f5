"""A request as plain data, on its way to another engine: everything but its KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from phasewise.request.params import SLO, Params
from phasewise.request.request import Request


def header_of(request: Request) -> dict[str, Any]:
    """What another engine needs to go on with a request; JSON carries it."""
    params = {f.name: getattr(request.params, f.name) for f in fields(Params) if f.init}
    return {
        "id": request.id,
        "tokens": list(request.tokens),
        "prompt_len": request.prompt_len,
        "computed": request.computed,
        "high_water": request.high_water,
        "params": params,
        "slo": [request.slo.ttft, request.slo.tpot],
        "recipe": request.recipe,
        "arrived": request.trace.arrived,
        "emitted": [list(pair) for pair in zip(request.trace.tokens, request.trace.counts)],
    }


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
    for at, count in header["emitted"]:
        request.trace.emitted(at, count)
    return request
