"""Translate the driver's errors into semel's."""

import psycopg
from psycopg import errors

from semel.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable

__all__ = ["is_cut", "is_transient", "is_unplaced", "to_store_error"]

TRANSIENT = frozenset(("40001", "40P01"))
"""Serialisation failure and deadlock: nothing was done, and the same statement may be retried."""
_FULL = frozenset(("53100",))
_READ_ONLY = frozenset(("25006",))
_MISSING = frozenset(("42P01", "3F000", "42703", "42883"))
_RIGHTS = frozenset(("42501",))
_POOLER = "unsupported startup parameter"
"""The error of a pooler that refuses our session settings."""
_UNANSWERED_CLASSES = ("08", "53", "55", "57", "58")


def is_transient(error: psycopg.Error) -> bool:
    """Whether the server rolled the statement back because of other transactions."""
    return error.sqlstate in TRANSIENT


def is_cut(error: psycopg.Error) -> bool:
    """Whether the connection is lost, so that the outcome of the statement is unknown."""
    state = error.sqlstate
    return isinstance(error, psycopg.OperationalError) and (state is None or state[:2] in ("08", "57"))


def is_unplaced(error: psycopg.Error) -> bool:
    """Whether there is no partition for the time inside an id."""
    return error.sqlstate == "23514" and error.diag.constraint_name is None


def to_store_error(error: psycopg.Error, name: str) -> StoreError:
    """Return the error to raise instead of the driver's."""
    state = error.sqlstate or ""
    detail = str(error).strip().partition("\n")[0]
    if state in _FULL:
        return StoreFull(
            f"no room to write to {name}: {detail}; free some disk space. Stored keys are still answered"
        )
    if is_unplaced(error):
        return StoreUnavailable(f"{name}: {detail}; create partitions with: semel purge, as their owner")
    if state in _READ_ONLY:
        return StoreRefused(f"{name} does not take writes: {detail}; connect to the primary")
    if state in _MISSING:
        return StoreRefused(f"{name} lacks semel's tables: {detail}; print them with: semel migrate --sql")
    if state in _RIGHTS:
        return StoreRefused(
            f"{name}: {detail}; grant the role its rights, or create the tables by hand: semel migrate --sql"
        )
    if isinstance(error, errors.InvalidPassword | errors.InvalidAuthorizationSpecification):
        return StoreRefused(f"{name} refused the login: {detail}")
    if _POOLER in detail:
        return StoreRefused(f"{name} is behind a transaction pooler: {detail}; add pooler=true to the URL")
    if (
        isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        or state[:2] in _UNANSWERED_CLASSES
    ):
        return StoreUnavailable(f"{name} gave no answer: {detail}")
    return StoreError(f"{name} refused a statement: {detail}")
