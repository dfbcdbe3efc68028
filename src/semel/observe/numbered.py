"""One small record of each process, found by number, which expires when the process stops.

A write is one claim without owner and lease, which replaces the metadata of the record. Readers need no listing of
records: the keys are `0`, `1` and so on, and each process takes the lowest free number. If two processes take the same
one, the one that finds the other's mark there takes another.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import msgspec

from semel.core.commands import Admit, Answer, Claim, Granted, Item, Lookup
from semel.core.machine import NOBODY
from semel.types import Record, Unavailable

__all__ = ["ALIVE_US", "KEPT_US", "Asking", "NumberedRecord", "NumberedState", "read_numbered"]

ALIVE_US = 6 * 10_000_000
"""A number whose last write is older than this is free."""
KEPT_US = 3600 * 10**6
"""How long the record of a process that died can still be read."""
PAGE = 16
NUMBERS_MAX = 4096

Asking: TypeAlias = Generator[Sequence[Item], Sequence[Answer], Any]
"""A generator that yields items for the store and receives their answers."""


class NumberedState(msgspec.Struct, omit_defaults=True):
    """What every such record holds, beside what its subclass adds."""

    mark: str
    """Identifies the process."""
    stopped: bool = False


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(NumberedState).decode


class NumberedRecord:
    """The record of one process. Not thread-safe."""

    def __init__(self, consumer: str) -> None:
        self._consumer = consumer
        """Also the tenant: one of semel's own, so that no user's statistics count these records."""
        self._number = -1
        self._admitted = False

    @property
    def was_written(self) -> bool:
        """Whether it was written, or tried."""
        return self._number >= 0

    def write(self, state: NumberedState, now_us: float) -> Asking:
        """Write the state; returns whether the store confirmed it. One read and one write."""
        if not self._admitted:
            (mode,) = yield (Admit(self._consumer, self._consumer, "lease"),)
            if isinstance(mode, Unavailable):
                return False
            self._admitted = True
        if not (yield from self._hold_number(state.mark, now_us)):
            return False
        place = _place(self._consumer, self._number)
        (answer,) = yield (Claim(place, NOBODY, 0, KEPT_US, meta=_encode(state)),)
        return isinstance(answer, Granted)

    def _hold_number(self, mark: str, now_us: float) -> Asking:
        """Keep the number, or take the lowest free one. Returns `False` if the store does not answer."""
        if self._number >= 0:
            (found,) = yield (Lookup(_place(self._consumer, self._number)),)
            if isinstance(found, Unavailable):
                return False
            if _is_free(found, mark, now_us):
                return True
        for at in range(0, NUMBERS_MAX, PAGE):
            answers = yield [Lookup(_place(self._consumer, number)) for number in range(at, at + PAGE)]
            for number, answer in enumerate(answers, at):
                if isinstance(answer, Unavailable):
                    return False
                if _is_free(answer, mark, now_us):
                    self._number = number
                    return True
        return False


def read_numbered(consumer: str, kind: type[NumberedState]) -> Asking:
    """Return the states of the processes that did not stop, each with the time of its last write."""
    found: list[tuple[NumberedState, int]] = []
    decode = msgspec.json.Decoder(kind).decode
    for at in range(0, NUMBERS_MAX, PAGE):
        answers = yield [Lookup(_place(consumer, number)) for number in range(at, at + PAGE)]
        for answer in answers:
            state = _state_of(answer, decode)
            if state is not None and not state.stopped:
                found.append((state, answer.lease_until_us))
        if not any(isinstance(answer, Record) for answer in answers):
            break
    return found


def _is_free(found: Any, mark: str, now_us: float) -> bool:
    """Whether a record is this process's own, or of one that has ended."""
    state = _state_of(found)
    if state is None or state.stopped or state.mark == mark:
        return True
    return bool(found.lease_until_us + ALIVE_US < now_us)


def _state_of(answer: Any, decode: Callable[[bytes], NumberedState] = _decode) -> NumberedState | None:
    if not isinstance(answer, Record) or answer.meta is None:
        return None
    try:
        return decode(answer.meta)
    except msgspec.MsgspecError:
        return None


def _place(consumer: str, number: int) -> tuple[str, str, str]:
    return (consumer, consumer, str(number))
