"""The audit: who changed what, as records under a separate tenant that no caller of the service can name.

An entry is written before its act is executed: if it cannot be written, nothing is done. Entries are only ever
added. Each has a random key, and stays for 90 days. Operators' acts always have one each; claims, renewals,
settles and marks of tokens have one for each request if the service is set to write them.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from msgspec import MsgspecError, Struct, json

from semel.codec import decode, encode
from semel.core.commands import (
    Admit,
    Answer,
    Claim,
    Forget,
    Granted,
    Item,
    Mark,
    Purge,
    Renew,
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
    "WRITES",
    "Act",
    "AuditEntry",
    "Writes",
    "act_of",
    "claims_of_writes",
    "entry_of",
    "held_by",
    "is_damaged",
    "is_forced",
    "note",
    "prefix_of",
    "settles_of_writes",
    "trail",
    "warn",
    "whoami",
    "writes_of",
]

TENANT = CONSUMER = "semel.audit"
"""The consumer of the entries: `semel list --consumer semel.audit`."""
WRITES = "semel.audit.writes"
"""The consumer of the entries about requests of tokens, apart from the acts so that those are found among them."""
CONSUMERS_SHOWN = 100
"""The most consumers that an entry about a request names, those with the most items; it counts the others."""
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


Writes: TypeAlias = dict[str, dict[str, Counter[str]]]
"""What a request writes: how many, by tenant, kind and consumer."""


def writes_of(items: Iterable[Item]) -> Writes:
    """Return what these items write, without operators' acts, which have entries of their own."""
    found: Writes = {}
    for item in items:
        match item:
            case (
                Claim(id=(tenant, consumer, _))
                | Renew(id=(tenant, consumer, _))
                | Settle(id=(tenant, consumer, _))
            ):
                count = 1
            case Mark(tenant=tenant, consumer=consumer):
                count = len(item.keys)
            case Admit(tenant=tenant, consumer=consumer):
                count = 1
            case _:
                continue
        found.setdefault(tenant, {}).setdefault(type(item).__name__.lower(), Counter())[consumer] += count
    return found


def claims_of_writes(actor: str, route: str, writes: Writes, now_us: int) -> list[Claim]:
    """Return the items that write one entry for each tenant; each is complete as soon as it is granted.

    The entry is in the claim's `meta`, because a claim and its completion are two round trips: the completion may
    follow together with the request's own items.
    """
    return [
        Claim(_place(tenant, minute_of(now_us)), new_owner(), LEASE_US, KEPT_US, meta=json.encode(entry))
        for tenant, kinds in writes.items()
        for entry in [
            {
                "action": "write",
                "actor": actor,
                "tenant": tenant,
                "route": route,
                "items": {kind: _most_common(counts) for kind, counts in kinds.items()},
            }
        ]
    ]


def settles_of_writes(claims: Sequence[Claim], answers: Sequence[Answer]) -> list[Settle]:
    """Return the completions of those entries. Raises `StoreError` if one was not written."""
    settles = []
    for claim, answer in zip(claims, answers, strict=True):
        granted = answer_or_raise(answer)
        if not isinstance(granted, Granted):
            raise StoreError("the audit could not be written, so nothing was changed; try again")
        assert claim.meta is not None
        value = encode(json.decode(claim.meta))
        settles.append(Settle(claim.id, claim.owner, granted.fence, "done", value, KEPT_US, LEASE_US))
    return settles


def minute_of(now_us: int) -> str:
    """Return the minute in UTC: the keys of entries about requests begin with it, after their tenant's prefix."""
    return datetime.fromtimestamp(now_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M")


def _most_common(counts: Mapping[str, int]) -> dict[str, int]:
    shown = dict(Counter(counts).most_common(CONSUMERS_SHOWN))
    rest = sum(counts.values()) - sum(shown.values())
    return shown | ({f"({len(counts) - len(shown)} others)": rest} if rest else {})


# --- reading ------------------------------------------------------------------------------------


def prefix_of(tenant: str | None) -> str:
    """Return the prefix of the keys of a tenant's entries; of all entries for `None`."""
    return "" if tenant is None else f"{digest((tenant, '', '')).hex()}:"


def entry_of(record: Record) -> AuditEntry:
    """Decode an entry from its record; an unreadable one is shown as damaged, with its readable parts."""
    times_us = (record.settled_at_us, record.first_seen_us)
    if record.consumer == WRITES:  # readable before it is completed, and with the same time
        times_us = times_us[::-1]
    at_us = times_us[0] or times_us[1]
    try:
        value = _content_of(record)
    except (RecordCorrupt, MsgspecError, ValueError, TypeError, RecursionError):
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
    return record.consumer in (CONSUMER, WRITES) and entry_of(record).damaged


def _content_of(record: Record) -> Any:
    if record.state == "done" and record.value is not None:
        return decode(record.value)
    if record.state == "claimed" and record.consumer == WRITES and record.meta is not None:
        return json.decode(record.meta)  # not completed yet, or the process died in between
    return None


def _damaged_entry(record: Record, at_us: int) -> AuditEntry:
    return AuditEntry(at_us, "", "damaged", "?", {"entry": record.key, "state": record.state}, damaged=True)


def _place(tenant: str, minute: str = "") -> Id:
    """Return the id of a new entry, of an act or of a request's writes; its key is random and cannot be guessed."""
    rest = new_owner().hex()
    if minute:
        return (TENANT, WRITES, f"{prefix_of(tenant)}{minute}:{rest}")
    return (TENANT, CONSUMER, prefix_of(tenant) + rest)


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
