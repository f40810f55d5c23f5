"""Running the router until a signal."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import uvicorn

from phasewise.cluster.prefix_routing import PrefixRouting
from phasewise.errors import UserError
from phasewise.serve.app import address, bound, listen
from phasewise.serve.route.front import RouteFront
from phasewise.serve.route.kv_listener import KVListener
from phasewise.serve.route.pool import ServerPool

PATIENCE = 5  # seconds that requests have to finish after a signal


def run(
    urls: Sequence[str], policy: PrefixRouting, *, host: str, port: int, interval: float, events: Sequence[str] = (),
) -> None:  # fmt: skip
    """Route until SIGINT or SIGTERM. `interval`: seconds between two looks at whether the servers are there; `events`:
    the endpoints at which they tell their KV events, in their order. Raises UserError."""
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise UserError(f"--to {url}: give the address of a server, such as http://127.0.0.1:8001")
    if events and len(events) != len(urls):
        raise UserError(f"--kv-events is given {len(events)} times for {len(urls)} servers: give one for each --to")
    with bound(host, port) as sock:
        pool = ServerPool(urls, policy, tokens=bool(events))
        listener = KVListener(dict(zip(events, (each.index for each in pool.upstreams)))) if events else None
        front = RouteFront(pool, interval, () if listener is None else (listener.run,))
        listen(sock, host)
        print(f"phasewise routes among {len(urls)} servers at {address(host, sock)}", flush=True)
        config = uvicorn.Config(
            front, ws="none", log_config=None, log_level="critical", access_log=False, server_header=False,
            date_header=False, timeout_graceful_shutdown=PATIENCE,
        )  # fmt: skip
        uvicorn.Server(config).run([sock])
