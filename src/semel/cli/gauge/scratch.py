"""A place beside the user's store that is thrown away: what is measured leaves nothing behind."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from semel.cli.exits import USAGE, CommandExit
from semel.cli.gauge.measure import Job
from semel.core.ports import Store

__all__ = ["Scratch", "new_name", "scratch_for", "with_options"]


KINDS = {
    "memory": "memory",
    "sqlite": "sqlite",
    "postgresql": "postgres",
    "postgres": "postgres",
    "redis": "redis",
    "rediss": "redis",
    "valkey": "redis",
    "valkeys": "redis",
}
"""Which module knows the raw limit of what a scheme names."""


class Scratch(NamedTuple):
    """Where clients may work, and what the thing beneath can do without semel."""

    kind: str
    """What it is called in a row."""
    target: str | Store
    """What to open clients on."""
    single_limit: str
    """What one operation is compared with."""
    single: Callable[[], Job]
    """One operation at a time, bare."""
    batch_limit: str
    """What a batch is compared with; `{size}` stands for its size."""
    batch: Callable[[int], Job]
    """Batches of this size, bare: as fast as it goes with the same durability."""


def new_name() -> str:
    """A name that nobody uses."""
    return f"semel_bench_{secrets.token_hex(4)}"


def with_options(url: str, **options: str) -> str:
    """The URL with these options instead of its own."""
    parts = urlsplit(url)
    kept = [(name, text) for name, text in parse_qsl(parts.query) if name not in options]
    return urlunsplit(parts._replace(query=urlencode([*kept, *options.items()])))


@contextmanager
def scratch_for(url: str) -> Iterator[Scratch]:
    """A scratch place of the kind that the URL names, on the same server or disk; removed at the end."""
    scheme = url.partition(":")[0].partition("+")[0]
    if scheme not in KINDS:
        raise CommandExit(f"no raw limit is known for {scheme}: stores; bench knows {', '.join(KINDS)}", USAGE)
    made: Callable[[str], AbstractContextManager[Scratch]]
    made = import_module(f"semel.cli.gauge.{KINDS[scheme]}").scratch
    with made(url) as place:
        yield place
