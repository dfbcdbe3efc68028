"""Access to a store without a client: reading a consumer never records a mode for it."""

import shlex
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from semel.cli.output import BAD_CONFIGURATION, NOT_FOUND, USAGE, CommandExit
from semel.core.commands import Command, Item, Lookup, ReadSettings, StoreSettings, answer_or_raise
from semel.core.ids import is_own
from semel.core.protocols import AsyncStore, Store
from semel.errors import PolicyInvalid, StoreError
from semel.keys.limits import check as check_key
from semel.runtime import audit
from semel.runtime.generators import drive
from semel.stores.registry import store_for
from semel.types import Absent, Record, Unavailable

if TYPE_CHECKING:
    from semel.cli.settings import CliSettings  # slow to import, and not needed for --help

__all__ = ["StoreAccess", "existing", "exists", "find_store", "open_store"]

R = TypeVar("R")


class StoreAccess:
    """An open store and the settings that select its records."""

    def __init__(self, store: Store, settings: "CliSettings") -> None:
        self.store = store
        self.settings = settings

    def ask(self, item: Command[R | Unavailable]) -> R:
        """Return the answer of the store. Raises `StoreUnavailable` if it does not answer."""
        answer: R | Unavailable = self.store.send((cast("Item", item),))[0]
        return answer_or_raise(answer)

    def check_window(self, window_us: int) -> None:
        """Raise `CommandExit` for a window that the store cannot promise to keep."""
        try:
            self.store.capabilities.check_window(window_us, self.store.name)
        except PolicyInvalid as error:
            raise CommandExit(str(error), USAGE) from None

    def act(self, item: Item, **more: Any) -> Any:
        """Write an operator's action into the audit, with `more` added, then execute it. Returns the answer.

        Raises `CommandExit` for a record of semel itself.
        """
        act = audit.act_of(item)
        assert act is not None
        if is_own(act.tenant, str(act.details.get("consumer", ""))):
            raise CommandExit(
                "records of semel itself are not changed by hand; tokens are revoked with `semel token revoke`",
                USAGE,
            )
        self.note(act.tenant, act.action, **act.details, **more)
        return answer_or_raise(self.store.send((item,))[0])

    def note(self, tenant: str, action: str, **details: Any) -> None:
        """Write an action into the audit, unless the store does so itself."""
        if not self.store.capabilities.audits:
            self.carry_out(audit.note(tenant, action, audit.whoami(), **details))

    def carry_out(self, asking: Generator[Item, Any, R]) -> R:
        """Run a generator that yields items for the store and receives their answers."""
        return drive(asking, lambda item: self.store.send((item,))[0])

    def read_settings(self) -> StoreSettings:
        """Read the windows and modes from the store."""
        return self.ask(ReadSettings())

    def scopes(self) -> list[tuple[str, str]]:
        """Return the (tenant, consumer) pairs that the settings select; default: all that exist."""
        tenant, consumer = self.settings.tenant, self.settings.consumer
        known = self.read_settings().modes
        found = {
            scope
            for scope in known
            if tenant in (None, scope[0]) and (consumer is None or consumer == scope[1])
        }
        if consumer is not None and not found:
            found.add((tenant or "", consumer))
        return sorted(found)

    def scope(self, consumer: str) -> tuple[str, str]:
        """Return the consumer of this name. Raises `CommandExit` if there is none, or if several tenants have one."""
        known = self.read_settings().modes
        found = [
            scope for scope in known if scope[1] == consumer and self.settings.tenant in (None, scope[0])
        ]
        if len(found) == 1:
            return found[0]
        if found:
            tenants = ", ".join(sorted(repr(tenant) for tenant, _ in found))
            raise CommandExit(
                f"consumer {consumer!r} exists for several tenants ({tenants}); choose with --tenant", USAGE
            )
        raise CommandExit(
            f"no consumer {consumer!r} in {self.store.name}{self.did_you_mean(consumer)}", NOT_FOUND
        )

    def did_you_mean(self, consumer: str) -> str:
        """Return a hint at a consumer with a similar name, if there is one."""
        near = get_close_matches(consumer, {name for _, name in self.read_settings().modes}, 1)
        return f"; did you mean {near[0]!r}?" if near else ""

    def records_of(self, key: str) -> list[Record]:
        """Return the records of this key, for every consumer that the settings select."""
        check_key(key)
        scopes = self.scopes()
        answers = self.store.send([Lookup((*scope, key)) for scope in scopes])
        found = [answer_or_raise(answer) for answer in answers]
        return [record for record in found if not isinstance(record, Absent)]

    def record_of(self, key: str) -> Record:
        """Return the record of this key. Raises `CommandExit` if there is none, or if several consumers have one."""
        found = self.records_of(key)
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(f"{record.consumer!r}" for record in found)
            raise CommandExit(
                f"{key!r} has a record for several consumers ({names}); choose with --consumer", USAGE
            )
        raise self.no_record(key)

    def no_record(self, key: str) -> CommandExit:
        """Return the error for a key without a record."""
        consumer = self.settings.consumer
        whose = (
            "any consumer"
            if consumer is None
            else f"consumer {consumer!r}{self.did_you_mean_unknown(consumer)}"
        )
        return CommandExit(
            f"no record of {key!r} for {whose} in {self.store.name}: new, expired or forgotten", NOT_FOUND
        )

    def did_you_mean_unknown(self, consumer: str) -> str:
        """Return a hint if the consumer does not exist."""
        known = {name for _, name in self.read_settings().modes}
        return "" if consumer in known else f" (not known here{self.did_you_mean(consumer)})"


@contextmanager
def open_store(settings: "CliSettings", *, create: bool = False) -> Iterator[StoreAccess]:
    """Open the store of the settings and connect it. Creates a missing file only with `create`."""
    store = find_store(settings) if create else existing(settings)
    store.open()
    try:
        yield StoreAccess(store, settings)
    finally:
        store.close()


def existing(settings: "CliSettings", flag: str = "--store") -> Store:
    """Return the store of the settings, not yet connected. Raises `CommandExit` if it does not exist."""
    store = find_store(settings)
    if not exists(store):
        raise CommandExit(
            f"{store.name} does not exist; name another with {flag}, or create it with: semel migrate --store"
            f" {shlex.quote(store.name)}",
            NOT_FOUND,
        )
    return store


def find_store(settings: "CliSettings") -> Store:
    """Return the store of the settings, not yet connected."""
    store: Store | AsyncStore = store_for(settings.store)
    if not isinstance(store, Store):
        raise CommandExit(
            f"{store.name} serves event loops only; the command line cannot use it", BAD_CONFIGURATION
        )
    return store


def exists(store: Store) -> bool:
    """Whether the store exists; an empty file does not count. True if only opening it can tell."""
    behind: Any = getattr(store, "truth", store)
    if hasattr(behind, "exists"):
        try:
            return bool(behind.exists())
        except StoreError:
            return True  # opening it reports the error
    if not hasattr(behind, "path"):
        return True
    file = Path(behind.path)
    return file.exists() and (not file.is_file() or file.stat().st_size > 0)
