"""The columns of a table of events: their names, and the check of an existing table."""

import re
from collections.abc import Collection, Mapping

from msgspec import Struct
from msgspec.structs import asdict, fields

from semel.errors import PolicyInvalid, StoreUnknown

__all__ = ["Columns", "Layout", "check_layout", "columns_of"]

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)


class Columns(Struct, frozen=True, kw_only=True):
    """Column names of a table of events. `tenant=""`: no such column; it takes only events without a tenant.

    A table such as `events (event_id UNIQUE, event_type, payload, processed_at DEFAULT now())` is
    `Columns(type="event_type", tenant="")`.
    """

    event_id: str = "event_id"
    type: str = "type"
    payload: str = "payload"
    tenant: str = "tenant"

    def __post_init__(self) -> None:
        for field, name in asdict(self).items():
            if not (field == "tenant" and not name) and not _NAME.fullmatch(name):
                raise StoreUnknown(f"{name!r} is not a valid name for the column {field}; use a-z, 0-9 and _")

    @property
    def names(self) -> tuple[str, ...]:
        """The written columns, in the order of `values`."""
        written = (self.event_id, self.type, self.payload)
        return (self.tenant, *written) if self.tenant else written

    @property
    def identity(self) -> frozenset[str]:
        """The columns that must be unique together."""
        return frozenset({self.event_id, self.tenant} - {""})

    def values(self, tenant: str, event_id: str, kind: str, payload: str) -> tuple[str, ...]:
        """Return the values of `names`. Raises `PolicyInvalid` for a tenant if the table has no column for it."""
        if self.tenant:
            return (tenant, event_id, kind, payload)
        if tenant:
            raise PolicyInvalid(
                f"event {event_id!r} is of tenant {tenant!r}, and the table of events has no column for tenants: equal"
                " ids of two tenants would be taken for one event"
            )
        return (event_id, kind, payload)


def columns_of(text: str) -> Columns:
    """Parse column names such as `type=event_type,tenant=`. Raises `StoreUnknown`."""
    said = dict(part.partition("=")[::2] for part in text.split(",") if part)
    known = [field.name for field in fields(Columns)]
    unknown = set(said) - set(known)
    if unknown:
        raise StoreUnknown(f"{min(unknown)} is not a column of an event; known are {', '.join(known)}")
    return Columns(**said)


class Layout(Struct, frozen=True):
    """The definition of a table in the database."""

    columns: Mapping[str, bool]
    """By name: whether a row must have a value, because the column has no default and is not nullable."""
    unique: Collection[frozenset[str]]
    """The sets of columns with a unique index over all rows."""


def check_layout(table: str, layout: Layout, columns: Columns) -> None:
    """Check that events can be written into an existing table. Raises `PolicyInvalid` with the fix."""
    missing = sorted(set(columns.names) - layout.columns.keys())
    if missing:
        raise PolicyInvalid(
            f"there is a table {table} already, for something else: it has no {', '.join(missing)}; give the events"
            " another table, or name its columns: Columns(type=..., tenant=...)"
        )
    unfilled = sorted(name for name, needed in layout.columns.items() if needed and name not in columns.names)
    if unfilled:
        raise PolicyInvalid(
            f"the table {table} needs a value for {', '.join(unfilled)}, which an event does not have: give the"
            " column a default, or the events another table"
        )
    if columns.identity not in layout.unique:
        wanted = ", ".join(sorted(columns.identity))
        raise PolicyInvalid(
            f"the table {table} would hold an event twice: CREATE UNIQUE INDEX ON {table} ({wanted})"
        )
