"""Record every call of a store in a file, before it is made and after it is answered, and read such files."""

import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from semel.core.commands import Answer, Claim, Forget, Item, Lookup, RecordItem, Renew, Resolve, Settle
from semel.core.protocols import AsyncStore, AsyncStoreWrapper, HasAsyncTwin, Store, StoreWrapper
from semel.stores.http.encoding import answers_from, answers_to, items_from
from semel.types import Id, Unavailable

__all__ = ["AsyncRecordingStore", "HistoryCall", "RecordingStore", "read_history"]

NEVER_NS = 1 << 62
"""The end of a call without an answer: it may take effect at any later time."""
_KINDS = (Claim, Renew, Settle, Lookup, Forget, Resolve)


class HistoryCall(Struct, frozen=True, kw_only=True):
    """One item that a worker sent to the store, when, and the answer."""

    worker: str
    item: RecordItem
    begun_ns: int
    """By the computer's monotonic clock, which its processes share."""
    ended_ns: int = NEVER_NS
    answer: Any = None
    """`None`: no answer came; whether the item took effect, and when, is not known."""
    clock_us: tuple[int, int] = (0, 0)
    """The time of day at the begin and at the end; without an end it is 0."""

    @property
    def answered(self) -> bool:
        """Whether the call has an answer."""
        return self.answer is not None

    def without_answer(self) -> "HistoryCall":
        """Return the call without its answer: it was carried out before its end, but with which answer is open."""
        return msgspec.structs.replace(self, answer=None)


History: TypeAlias = dict[Id, list[HistoryCall]]
"""The calls of each key, in the order in which they began."""


_NOTHING = msgspec.Raw(b"null")


class _Line(Struct, omit_defaults=True):
    """A line of a file: the begin of a call with its items, or its end with the answers or the error."""

    call: int
    at_ns: int
    clock_us: int
    worker: str = ""
    items: msgspec.Raw = _NOTHING
    answers: msgspec.Raw = _NOTHING
    error: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Line).decode


class _Recorder:
    """Appends lines to one file. A line is one write, so a killed process leaves whole lines."""

    def __init__(self, path: str | Path, worker: str) -> None:
        self.worker = worker or f"{os.getpid()}"
        self.path = os.fspath(path)
        self._file = -1
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def open(self) -> None:
        with self._lock:
            if self._file < 0:
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def begin(self, items: Sequence[Item]) -> int:
        number = next(self._numbers)
        thread = threading.current_thread()
        who = self.worker if thread is threading.main_thread() else f"{self.worker}/{thread.name}"
        self._write(_Line(number, time.monotonic_ns(), _clock_us(), who, msgspec.Raw(_encode(list(items)))))
        return number

    def end(self, number: int, answers: Sequence[Answer]) -> None:
        at_ns, clock_us = time.monotonic_ns(), _clock_us()
        self._write(_Line(number, at_ns, clock_us, answers=msgspec.Raw(answers_to(answers, packed=False))))

    def fail(self, number: int, error: BaseException) -> None:
        self._write(_Line(number, time.monotonic_ns(), _clock_us(), error=repr(error)))

    def _write(self, line: _Line) -> None:
        with self._lock:
            if self._file >= 0:  # a call that ends after `close` has no recorded end
                os.write(self._file, _encode(line) + b"\n")


def _clock_us() -> int:
    return time.time_ns() // 1000


class RecordingStore(StoreWrapper):
    """A store that records each call in a file; one file for each process. Everything else is the store's own."""

    def __init__(self, store: Store, path: str | Path, worker: str = "") -> None:
        super().__init__(store)
        self._recorder = _Recorder(path, worker)

    def open(self) -> None:
        """Open the file and the store."""
        self._recorder.open()
        super().open()

    def close(self) -> None:
        """Close the store, then the file."""
        super().close()
        self._recorder.close()

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Send the items, and write down when, and the answers."""
        number = self._recorder.begin(items)
        try:
            answers = self._store.send(items)
        except BaseException as error:
            self._recorder.fail(number, error)
            raise
        self._recorder.end(number, answers)
        return answers

    def twin(self) -> "AsyncRecordingStore":
        """Return the store's own twin, recorded in the same file. Raises `TypeError` if it has none."""
        if not isinstance(self._store, HasAsyncTwin):
            raise TypeError(f"{self.name} has no twin for an event loop")
        return AsyncRecordingStore(self._store.twin(), self._recorder.path, self._recorder.worker)


class AsyncRecordingStore(AsyncStoreWrapper):
    """The same for an event loop."""

    def __init__(self, store: AsyncStore, path: str | Path, worker: str = "") -> None:
        super().__init__(store)
        self._recorder = _Recorder(path, worker)

    async def aopen(self) -> None:
        """Open the file and the store."""
        self._recorder.open()
        await super().aopen()

    async def aclose(self) -> None:
        """Close the store, then the file."""
        await super().aclose()
        self._recorder.close()

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Send the items, and write down when, and the answers."""
        number = self._recorder.begin(items)
        try:
            answers = await self._store.asend(items)
        except BaseException as error:
            self._recorder.fail(number, error)
            raise
        self._recorder.end(number, answers)
        return answers


def read_history(paths: Iterable[str | Path]) -> History:
    """Read the files of all processes of a run. A torn last line, of a process that was killed, is left out.

    Raises `ValueError` for a file that `RecordingStore` did not write.
    """
    found: History = defaultdict(list)
    for path in paths:
        begun: dict[int, tuple[_Line, list[Item]]] = {}
        lines = Path(path).read_bytes().splitlines(keepends=True)
        for number, text in enumerate(lines, 1):
            if not text.endswith(b"\n"):
                continue
            try:
                line = _decode(text)
                if line.items != _NOTHING:
                    begun[line.call] = line, items_from(bytes(line.items), packed=False)
                else:
                    _add(found, *begun.pop(line.call), line)
            except (msgspec.MsgspecError, KeyError, ValueError) as error:
                raise ValueError(f"{path}, line {number} is not of a recorded history: {error!r}") from error
        for start, items in begun.values():
            _add(found, start, items, None)
    for calls in found.values():
        calls.sort(key=lambda call: (call.begun_ns, call.ended_ns))
    return dict(found)


def _add(found: History, start: _Line, items: list[Item], end: _Line | None) -> None:
    answers: list[Any] = [None] * len(items)
    if end is not None and end.answers != _NOTHING:
        answers = answers_from(bytes(end.answers), packed=False)
    for item, answer in zip(items, answers, strict=True):
        if not isinstance(item, _KINDS):
            continue
        call = HistoryCall(worker=start.worker, item=item, begun_ns=start.at_ns, clock_us=(start.clock_us, 0))
        if end is not None and answer is not None and not isinstance(answer, Unavailable):
            call = msgspec.structs.replace(
                call, answer=answer, ended_ns=end.at_ns, clock_us=(start.clock_us, end.clock_us)
            )
        found[item.id].append(call)
