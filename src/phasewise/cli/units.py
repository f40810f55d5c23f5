"""Notes on numbers that were probably meant in another unit; they are used as given."""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.cli.asked import Targets
from phasewise.cli.options import parse_bytes

SHORTEST = {"ttft": 5.0, "tpot": 0.5, "tbt": 0.5}  # ms that no service is asked to keep
SLOWEST = 1 << 20  # bytes/s of a link that anybody would send KV over


def doubts(targets: Targets, link: str | None) -> Iterator[str]:
    """A note per value that looks like seconds instead of milliseconds, or GB/s instead of bytes/s."""
    for name in SHORTEST:
        value = getattr(targets, name)
        if value is not None and 0 < value < SHORTEST[name]:
            yield f"--{name} {value:g} are milliseconds; for {value:g} s write --{name} {1e3 * value:g}"
    if link is not None and parse_bytes(link) < SLOWEST:
        yield f"--link {link} is {parse_bytes(link):,} bytes/s; for so many GiB/s write {link.rstrip('bBiI')}G"
