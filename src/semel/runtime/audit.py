"""The audit: who changed what, as records under a separate tenant that no caller of the service can name.

An entry is written before its act is executed: if it cannot be written, nothing is done. Entries are only ever
added. Each has a random key, and stays for 90 days.
"""

from collections.abc import Generator
from typing import Any

from msgspec import Struct

from semel.codec import decode, encode
from semel.core.commands import (
    Admit,
    Claim,
    Forget,
    Granted,
    Item,
    Purge,
    Resolve,
    Settle,
    SetWindow,
    SwitchMode,
    answer_or_raise,
)
from semel.core.ids import digest
from semel.errors import RecordCorrupt, StoreError
from semel.runtime.process import logging, new_owner
from semel.types import Id, Record
from semel.windows import exact_text

__all__ = [
    "CONSUMER",
    "TENANT",
    "Act",
    "AuditEntry",
    "act_of",
    "entry_of",
    "held_by",
    "is_damaged",
    "is_forced",
    "note",
    "prefix_of",
    "trail",
    "warn",
    "whoami",
]

TENANT = CONSUMER = "semel.audit"
"""The consumer of the entries: `semel list --consumer semel.audit`."""
KEPT_US = 90 * 86400 * 1_000_000
LEASE_US = 30_000_000
_SHOWN = 12
"""How many digits of a digest replace a key in texts that must not contain keys."""


class Act(Struct, frozen=True):
    """The audited part of an item."""

    tenant: str
    """The tenant of the affected records; empty: no tenant, or all."""
    action: str
    details: dict[str, Any]


class AuditEntry(Struct, frozen=True):
    """One entry of the audit, for display."""

    at_us: int
    tenant: str
    action: str
    actor: str
    details: dict[str, Any]
    damaged: bool = False


# --- writing ------------------------------------------------------------------------------------


def act_of(item: Item) -> Act | None:
    """Return the act to record before this item is executed; `None`: it is not an operator's act."""
    match item:
        case Forget(id=(tenant, consumer, key), force=force, fence=fence):
            action = "forget --force" if force else "forget"
            return Act(tenant, action, {"consumer": consumer, "key": key, "fence": fence})
        case Resolve(id=(tenant, consumer, key), fence=fence, to=to):
            return Act(tenant, f"resolve to {to}", {"consumer": consumer, "key": key, "fence": fence})
        case SetWindow():
            window = "removed" if item.window_us is None else exact_text(item.window_us)
            return Act(
                item.tenant,
                "window set",
                {
                    "consumer": item.consumer,
                    "event_type": item.event_type,
                    "window": window,
                    "existing": item.existing,
                },
            )
        case SwitchMode():
            return Act(item.tenant, "mode switch", {"consumer": item.consumer, "mode": item.mode})
        case Purge(dry_run=False):
            return Act("", "purge", {"limit": item.limit})
        case _:
            return None


def note(tenant: str, action: str, actor: str, **details: Any) -> Generator[Item, Any, None]:
    """Write an entry; yields items. Raises `StoreUnavailable`."""
    owner, place = new_owner(), _place(tenant)
    answer_or_raise((yield Admit(TENANT, CONSUMER, "lease")))
    granted = answer_or_raise((yield Claim(place, owner, LEASE_US, KEPT_US)))
    if not isinstance(granted, Granted):
        raise StoreError("the audit could not be written, so nothing was changed; try again")
    value = encode({"action": action, "actor": actor, "tenant": tenant, **details})
    answer_or_raise((yield Settle(place, owner, granted.fence, "done", value, KEPT_US, LEASE_US)))
    logging.getLogger("semel").info("audit: %s by %s", action, actor)


def trail(record: Record, actor: str | None) -> Generator[Item, Any, None]:
    """Write an entry about a running claim that is forgotten by force; yields items."""
    act = act_of(Forget(record.id, force=True, fence=record.fence))
    assert act is not None
    return note(act.tenant, act.action, actor or whoami(), **act.details, **held_by(record))


def held_by(record: Record) -> dict[str, Any]:
    """Return the owner and attempt of a claim that is forgotten by force, for the audit."""
    return {"attempt": record.attempt, "owner": record.owner.hex()} if is_forced(record) else {}


def is_forced(record: Record) -> bool:
    """Whether forgetting this record takes a running claim from its owner."""
    return record.state == "claimed" and bool(record.owner)


def warn(record: Record, actor: str | None) -> None:
    """Log that a running claim was forgotten by force."""
    logging.getLogger("semel").warning(
        "a running claim was forgotten by force: actor=%s tenant=%s consumer=%s key_digest=%s fence=%d attempt=%d",
        actor or whoami(),
        record.tenant or "-",
        record.consumer,
        _name(record),
        record.fence,
        record.attempt,
    )


# --- reading ------------------------------------------------------------------------------------


def prefix_of(tenant: str | None) -> str:
    """Return the prefix of the keys of a tenant's entries; of all entries for `None`."""
    return "" if tenant is None else f"{digest((tenant, '', '')).hex()}:"


def entry_of(record: Record) -> AuditEntry:
    """Decode an entry from its record; an unreadable one is shown as damaged, with its readable parts."""
    at_us = record.settled_at_us or record.first_seen_us
    try:
        value = decode(record.value) if record.state == "done" and record.value is not None else None
    except (RecordCorrupt, ValueError, TypeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return _damaged_entry(record, at_us)
    details = dict(value)
    action, actor, tenant = (
        details.pop("action", None),
        details.pop("actor", None),
        details.pop("tenant", None),
    )
    if not (isinstance(action, str) and isinstance(actor, str) and isinstance(tenant, str)):
        return _damaged_entry(record, at_us)
    if not record.key.startswith(prefix_of(tenant)):
        return _damaged_entry(record, at_us)
    return AuditEntry(at_us, tenant, action, actor, details)


def is_damaged(record: Record) -> bool:
    """Whether this is an unreadable entry of the audit."""
    return record.consumer == CONSUMER and entry_of(record).damaged


def _damaged_entry(record: Record, at_us: int) -> AuditEntry:
    return AuditEntry(at_us, "", "damaged", "?", {"entry": record.key, "state": record.state}, damaged=True)


def _place(tenant: str) -> Id:
    """Return the id of a new entry; its key is random and cannot be guessed."""
    return (TENANT, CONSUMER, prefix_of(tenant) + new_owner().hex())


def _name(record: Record) -> str:
    return digest(record.id).hex()[:_SHOWN]


def whoami() -> str:
    """Return the user and host of this process: the best available name of its operator."""
    import getpass
    import os
    import platform

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may have no name for its user
        user = f"uid {os.getuid()}"
    return f"{user}@{platform.node() or 'unknown host'}"
