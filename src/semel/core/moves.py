"""A consumer's move from one store to another: what is noted in both stores, and who may open which.

A note is a stored window of a tenant of semel's own, so every store can hold it, and a client reads it with the
settings that it reads anyway:

    MOVING_IN + tenant, in the new store: clients of the new store alone are refused
    MOVED_OUT + tenant, in the old store: clients of the old store alone are refused; its value is the time of the note
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from semel.core.commands import SetWindow, StoreSettings
from semel.core.ids import OWN
from semel.errors import StoreMoved

__all__ = ["check_moves", "moved_out", "moving_in", "note", "places_of_moves", "without_moves"]

MOVING_IN, MOVED_OUT = f"{OWN}moving-in.", f"{OWN}moved-out."
Windows = Mapping[tuple[str, str, str], int]


def moving_in(windows: Windows, tenant: str, consumer: str) -> dict[str, int]:
    """Return the stores from which the consumer moves in, by name."""
    return _notes(windows, MOVING_IN + tenant, consumer)


def moved_out(windows: Windows, tenant: str, consumer: str) -> dict[str, int]:
    """Return the stores to which the consumer has moved, by name, with the time of the note in microseconds."""
    return _notes(windows, MOVED_OUT + tenant, consumer)


def _notes(windows: Windows, tenant: str, consumer: str) -> dict[str, int]:
    return {name: us for (whose, who, name), us in windows.items() if whose == tenant and who == consumer}


def note(prefix: str, tenant: str, consumer: str, other: str, value: int | None) -> SetWindow:
    """Return the item that writes a note, or removes it (`None`)."""
    return SetWindow(prefix + tenant, consumer, other, value)


def check_moves(windows: Windows, scopes: Iterable[tuple[str, str]]) -> None:
    """Raise `StoreMoved` if one of these (tenant, consumer) must not use this store alone."""
    if not any(tenant.startswith((MOVING_IN, MOVED_OUT)) for tenant, _, _ in windows):
        return
    for tenant, consumer in scopes:
        for other in moved_out(windows, tenant, consumer):
            raise StoreMoved(
                f"consumer {consumer!r} has moved to {other}, and what it does there is not known here; open"
                f" semel.migrating(old=..., new=...), or the new store when the move is finished"
            )
        for other in moving_in(windows, tenant, consumer):
            raise StoreMoved(
                f"consumer {consumer!r} is moving in from {other}, which still knows events that are not known here;"
                f" use semel.migrating(old=..., new=...) until `semel move finish` succeeds"
            )


def places_of_moves(windows: Windows) -> frozenset[tuple[str, str]]:
    """Return every tenant and consumer with a note."""
    return frozenset(
        (tenant.removeprefix(MOVING_IN).removeprefix(MOVED_OUT), consumer)
        for tenant, consumer, _ in windows
        if tenant.startswith((MOVING_IN, MOVED_OUT))
    )


def without_moves(settings: StoreSettings) -> StoreSettings:
    """Return the settings without notes of moves, for the store that is the move."""
    windows = {
        place: us for place, us in settings.windows.items() if not place[0].startswith((MOVING_IN, MOVED_OUT))
    }
    return replace(settings, windows=windows)
