"""Who is asking, and what of the store they see: the tenant comes from the token, never from an item.

For a token of one tenant the store has no tenants: its items name none, and its answers show none. A token of all
tenants says whom it acts for, item by item.
"""

from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from semel.core.commands import (
    Admit,
    Answer,
    Claim,
    Count,
    Forget,
    Item,
    Lookup,
    Mark,
    Page,
    Purge,
    ReadSettings,
    Renew,
    Resolve,
    Scan,
    Settings,
    Settle,
    SetWindow,
    SwitchMode,
)
from semel.server import benchmarks, tokens
from semel.server.problems import Problem
from semel.server.tokens import ROLES, Role
from semel.types import Record, Stats

__all__ = ["ANYBODY", "Caller", "scoped", "unscoped"]

R = TypeVar("R", bound=Claim | Renew | Settle | Lookup | Forget | Resolve)

RESERVED = "semel."
"""Consumers of semel's own, such as the audit: only admins write there."""
HIDDEN = {
    tokens.TENANT: "tokens are not reached over HTTP; use `semel token`",
    benchmarks.TENANT: "benchmarks are not reached over HTTP; the dashboard shows them",
}
"""Tenants of semel's own, and what is said to whoever names one."""

NEEDED: dict[type, Role] = {
    Lookup: "read",
    Count: "read",
    ReadSettings: "read",
    Claim: "write",
    Renew: "write",
    Settle: "write",
    Mark: "write",
    Admit: "write",
    Scan: "admin",
    Forget: "admin",
    Resolve: "admin",
    SetWindow: "admin",
    SwitchMode: "admin",
    Purge: "admin",
}
"""The least role that each kind of item asks for."""


class Caller(Struct, frozen=True):
    """Whoever sent the request."""

    name: str
    """What its rate is counted under."""
    tenant: str | None
    """Whose records it reaches; `None`: everybody's."""
    role: Role

    def require(self, role: Role) -> None:
        """Raises `Problem` unless it may do what that role may."""
        if ROLES.index(self.role) < ROLES.index(role):
            raise Problem(403, "forbidden", f"this needs a token with the role {role}; yours has {self.role}")

    def may_write(self, consumer: str) -> None:
        """Raises `Problem` for a consumer of semel's own, unless an admin asks."""
        if consumer.startswith(RESERVED):
            self.require("admin")

    def acting_for(self, named: str | None) -> str:
        """The tenant of a request that may name one in its header `Semel-Tenant`."""
        if self.tenant is None:
            return _not_hidden(named or "")
        if named:
            raise _named_a_tenant()
        return self.tenant


ANYBODY = Caller("anybody", None, "admin")
"""Who comes in where no token is asked for: on loopback only."""


def scoped(caller: Caller, item: Item) -> Item:
    """The item as this caller may send it, for its own tenant. Raises `Problem`."""
    caller.require("write" if isinstance(item, Scan) and item.orphaned else NEEDED[type(item)])
    match item:
        case ReadSettings():
            return item
        case Purge():
            if caller.tenant is not None:
                raise Problem(
                    403, "forbidden", "purging is for a token of all tenants: it cleans up for everybody"
                )
            return item
        case Scan() | Count():
            tenant = item.tenant if caller.tenant is None else _own(caller, item.tenant or "")
            _not_hidden(tenant or "")
            return item if tenant == item.tenant else replace(item, tenant=tenant)
        case Mark() | SetWindow() | Admit() | SwitchMode():
            caller.may_write(item.consumer)
            tenant = _own(caller, item.tenant)
            return item if tenant == item.tenant else replace(item, tenant=tenant)
        case Lookup():
            return _with_own_id(caller, item)
        case Claim() | Renew() | Settle() | Forget() | Resolve():
            caller.may_write(item.id[1])
            return _with_own_id(caller, item)


def unscoped(caller: Caller, answer: Answer) -> Answer:
    """The answer as this caller may see it."""
    if isinstance(answer, Settings):
        return _own_settings(caller, answer)
    if isinstance(answer, Page):
        if caller.tenant is None:
            return Page([each for each in answer.records if each.tenant not in HIDDEN], answer.cursor)
        return Page([_nameless(each) for each in answer.records], answer.cursor) if caller.tenant else answer
    if caller.tenant is None:
        return answer
    if isinstance(answer, Stats):
        return Stats(now=answer.now, states=answer.states, consumers=answer.consumers, marks=answer.marks)
    return _nameless(answer) if isinstance(answer, Record) and caller.tenant else answer


def _with_own_id(caller: Caller, item: R) -> R:
    said, consumer, key = item.id
    tenant = _own(caller, said)
    return item if tenant == said else replace(item, id=(tenant, consumer, key))


def _own(caller: Caller, said: str) -> str:
    if caller.tenant is None:
        return _not_hidden(said)
    if said:
        raise _named_a_tenant()
    return caller.tenant


def _own_settings(caller: Caller, settings: Settings) -> Settings:
    if caller.tenant is None:
        return Settings(
            settings.windows,
            {place: mode for place, mode in settings.modes.items() if place[0] not in HIDDEN},
            settings.ids,
            settings.live_us,
        )
    mine = caller.tenant
    return Settings(
        {("", *place[1:]): us for place, us in settings.windows.items() if place[0] == mine},
        {("", place[1]): mode for place, mode in settings.modes.items() if place[0] == mine},
        {("", place[1]): kind for place, kind in settings.ids.items() if place[0] == mine},
        settings.live_us,
    )


def _nameless(record: Record) -> Record:
    return replace(record, id=("", *record.id[1:]))


def _named_a_tenant() -> Problem:
    return Problem(
        403, "forbidden", "this token is for one tenant: name none, every item is for that tenant already"
    )


def _not_hidden(tenant: str) -> str:
    if tenant in HIDDEN:
        raise Problem(403, "forbidden", HIDDEN[tenant])
    return tenant
