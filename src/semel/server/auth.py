"""Callers and their permissions: the tenant comes from the token, never from an item.

A token of one tenant sees a store without tenants: its items and answers name none. A token of all
tenants names the tenant in each item.
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
    Settle,
    SetWindow,
    StoreSettings,
    SwitchMode,
)
from semel.core.ids import OWN
from semel.observe import rollups
from semel.server.problems import HttpProblem
from semel.server.tokens import ROLES, Role, Token
from semel.types import Record, Stats

__all__ = ["ANYBODY", "Caller", "caller_for", "permit", "permit_tenant", "to_caller_answer", "to_store_item"]

R = TypeVar("R", bound=Claim | Renew | Settle | Lookup | Forget | Resolve)

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
"""The lowest role that may send each kind of item."""


class Caller(Struct, frozen=True):
    """The sender of a request."""

    name: str
    """The name under which its rate is counted."""
    tenant: str | None
    """The tenant whose records it may use; `None`: all."""
    role: Role
    label: str = ""
    """Its name in the audit."""

    def require(self, role: Role) -> None:
        """Check the role. Raises `HttpProblem` if it is too low."""
        if ROLES.index(self.role) < ROLES.index(role):
            raise HttpProblem(
                403, "forbidden", f"this needs a token with the role {role}; yours has {self.role}"
            )

    def require_all_tenants(self, why: str) -> None:
        """Require a token of all tenants. Raises `HttpProblem`."""
        if self.tenant is not None:
            raise HttpProblem(403, "forbidden", f"{why}; use a token of all tenants")

    def acting_for(self, named: str | None) -> str:
        """Return the tenant of a request, which may be in its header `Semel-Tenant`. Raises `HttpProblem`."""
        if self.tenant is None:
            return _not_own(named or "")
        if named:
            raise _tenant_named_problem()
        return self.tenant


ANYBODY = Caller("anybody", None, "admin", "anybody on this computer")
"""The caller with `--auth none`, on loopback only."""


def caller_for(token: Token) -> Caller:
    """Return the caller of this token."""
    return Caller(f"token {token.id}", token.tenant, token.role, f"{token.name} (token {token.id})")


def permit(caller: Caller, item: Item) -> None:
    """Check that this caller may send this item, which names its tenant. Raises `HttpProblem`.

    The only check, for endpoints and pages: the service makes it for every item that it executes for a caller.
    """
    caller.require("write" if isinstance(item, Scan) and item.orphaned else NEEDED[type(item)])
    permit_tenant(caller, item)


def permit_tenant(caller: Caller, item: Item) -> None:
    """Check that this caller may reach what this item names. Raises `HttpProblem`.

    A page makes this check alone for what it reads and shows without keys, such as the number of running claims.
    """
    if caller.tenant is None and _writes_figures(item):
        return
    match item:
        case ReadSettings():
            pass
        case Purge():
            caller.require_all_tenants("purging affects all tenants")
        case Scan() | Count():
            _check_tenant(caller, item.tenant)
        case Mark() | SetWindow() | Admit() | SwitchMode():
            _check_tenant(caller, item.tenant)
            _not_own_consumer(item.consumer)
        case Lookup():
            _check_tenant(caller, item.id[0])
            if item.id[1].startswith(OWN):
                caller.require("admin")
        case Claim() | Renew() | Settle() | Forget() | Resolve():
            _check_tenant(caller, item.id[0])
            _not_own_consumer(item.id[1])


def to_store_item(caller: Caller, item: Item) -> Item:
    """Return the item with the caller's tenant. Raises `HttpProblem` if it names another."""
    match item:
        case ReadSettings() | Purge():
            return item
        case Scan() | Count():
            tenant = item.tenant if caller.tenant is None else _own(caller, item.tenant or "")
            return item if tenant == item.tenant else replace(item, tenant=tenant)
        case Mark() | SetWindow() | Admit() | SwitchMode():
            tenant = _own(caller, item.tenant)
            return item if tenant == item.tenant else replace(item, tenant=tenant)
        case Lookup() | Claim() | Renew() | Settle() | Forget() | Resolve():
            return _with_own_id(caller, item)


def to_caller_answer(caller: Caller, answer: Answer) -> Answer:
    """Return the answer as this caller may see it."""
    if isinstance(answer, StoreSettings):
        return _own_settings(caller, answer)
    if isinstance(answer, Page):
        if caller.tenant is None:
            return Page([each for each in answer.records if not each.tenant.startswith(OWN)], answer.cursor)
        return Page([_nameless(each) for each in answer.records], answer.cursor) if caller.tenant else answer
    if caller.tenant is None:
        return answer
    if isinstance(answer, Stats):
        return Stats(
            now_us=answer.now_us, states=answer.states, consumers=answer.consumers, marks=answer.marks
        )
    return _nameless(answer) if isinstance(answer, Record) and caller.tenant else answer


def _with_own_id(caller: Caller, item: R) -> R:
    said, consumer, key = item.id
    tenant = _own(caller, said)
    return item if tenant == said else replace(item, id=(tenant, consumer, key))


def _own(caller: Caller, said: str) -> str:
    if caller.tenant is None:
        return said
    if said:
        raise _tenant_named_problem()
    return caller.tenant


def _own_settings(caller: Caller, settings: StoreSettings) -> StoreSettings:
    if caller.tenant is None:
        return StoreSettings(
            settings.windows,
            {place: mode for place, mode in settings.modes.items() if not place[0].startswith(OWN)},
            settings.ids,
            settings.live_us,
        )
    mine = caller.tenant
    return StoreSettings(
        {("", *place[1:]): us for place, us in settings.windows.items() if place[0] == mine},
        {("", place[1]): mode for place, mode in settings.modes.items() if place[0] == mine},
        {("", place[1]): kind for place, kind in settings.ids.items() if place[0] == mine},
        settings.live_us,
    )


def _nameless(record: Record) -> Record:
    return replace(record, id=("", *record.id[1:]))


def _tenant_named_problem() -> HttpProblem:
    return HttpProblem(403, "forbidden", "this token is for one tenant: do not name a tenant in items")


def _writes_figures(item: Item) -> bool:
    """Whether the item writes rollups for the dashboard, as `RollupHook` does."""
    match item:
        case Admit():
            return (item.tenant, item.consumer, item.mode) == (rollups.TENANT, rollups.CONSUMER, "lease")
        case Lookup() | Claim() | Renew() | Settle():
            return item.id[:2] == (rollups.TENANT, rollups.CONSUMER)
        case _:
            return False


def _check_tenant(caller: Caller, tenant: str | None) -> None:
    if caller.tenant is not None and caller.tenant != tenant:
        raise _tenant_named_problem()
    _not_own(tenant or "")


def _not_own(tenant: str) -> str:
    """Refuse semel's own tenants: tokens, sessions, audit, rollups. Raises `HttpProblem`."""
    if tenant.startswith(OWN):
        raise HttpProblem(
            403,
            "forbidden",
            f"tenants that begin with {OWN!r} hold records of semel itself and are not reached over HTTP;"
            " use `semel token` and `semel list --internal`, or look at the dashboard",
        )
    return tenant


def _not_own_consumer(consumer: str) -> None:
    if consumer.startswith(OWN):
        raise HttpProblem(
            403,
            "forbidden",
            f"consumers that begin with {OWN!r} are semel's own; they cannot be written here",
        )
