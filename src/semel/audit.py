"""What operators leave behind: a record under a consumer of its own for each forced `forget` and each action on a page.

Nothing is forced without its trace: where that cannot be written, nothing is forgotten.
"""

from collections.abc import Generator
from typing import Any

from semel.codec import encode
from semel.core.commands import Admit, Claim, Granted, Item, Settle
from semel.digests import digest
from semel.forks import new_owner
from semel.lazily import logging
from semel.plans import reachable
from semel.types import Record

__all__ = ["CONSUMER", "is_forced", "note", "trail", "warn"]

CONSUMER = "semel.audit"
"""Whose records the traces are: `semel list --consumer semel.audit`."""
KEPT_US = 90 * 86400 * 1_000_000
LEASE_US = 30_000_000
_SHOWN = 12
"""How many digits of a digest stand for a key where people read it and keys do not belong."""


def is_forced(record: Record) -> bool:
    """Whether to forget this record takes the claim away from somebody."""
    return record.state == "claimed" and bool(record.owner)


def trail(record: Record, actor: str | None) -> tuple[Admit, Settle]:
    """The items that write the trace: a done record whose value says who took which claim from whom."""
    found = _name(record)
    value = {
        "action": "forget --force",
        "actor": actor or _whoami(),
        "consumer": record.consumer,
        "key_digest": found,
        "fence": record.fence,
        "attempt": record.attempt,
        "owner": record.owner.hex(),
    }
    name = (record.tenant, CONSUMER, f"forget:{found}:{record.fence}")
    return (
        Admit(record.tenant, CONSUMER, "lease"),
        Settle(name, new_owner(), record.fence, "done", encode(value), window_us=KEPT_US),
    )


def warn(record: Record, actor: str | None) -> None:
    """The same for whoever reads the log."""
    logging.getLogger("semel").warning(
        "a running claim was forgotten by force: actor=%s tenant=%s consumer=%s key_digest=%s fence=%d attempt=%d",
        actor or _whoami(),
        record.tenant or "-",
        record.consumer,
        _name(record),
        record.fence,
        record.attempt,
    )


def note(tenant: str, action: str, actor: str, **details: Any) -> Generator[Item, Any, None]:
    """Write that somebody did something, before it is done; yields items. Raises `StoreUnavailable`."""
    owner = new_owner()
    place = (tenant, CONSUMER, f"{action.partition(' ')[0]}:{owner.hex()}")
    reachable((yield Admit(tenant, CONSUMER, "lease")))
    granted = reachable((yield Claim(place, owner, LEASE_US, KEPT_US)))
    assert isinstance(granted, Granted)  # nobody else has that key
    value = encode({"action": action, "actor": actor, **details})
    reachable((yield Settle(place, owner, granted.fence, "done", value, KEPT_US, LEASE_US)))
    logging.getLogger("semel").info("audit: %s by %s", action, actor)


def _name(record: Record) -> str:
    return digest(record.id).hex()[:_SHOWN]


def _whoami() -> str:
    """The user and host of this process: the best that it knows of its operator."""
    import getpass
    import os
    import platform

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may have no name for its user
        user = f"uid {os.getuid()}"
    return f"{user}@{platform.node() or 'unknown host'}"
