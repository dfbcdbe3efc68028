"""The index of marks in RocksDB: a database for each partition, a column family for each part of the window.

Marks and the offset up to which they are true are written in one batch. After a crash both are there or neither
(the log of the database is written in order), so the index is behind at most. A part of the window that is over is
dropped whole: the size follows the window.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from semel.errors import StoreRefused, StoreUnavailable
from semel.runtime.extras import install_command
from semel.streams.mark_format import unpack_mark

try:
    from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch
except ImportError as _error:
    raise ImportError(
        f"the local index needs rocksdict; install the extra: {install_command('streams')}"
    ) from _error

__all__ = ["PARTS", "RocksIndex", "RocksIndexes"]

_log = logging.getLogger("semel.streams")

PARTS = 4
"""The window is divided into so many parts, so one more than that is kept."""
BUFFER_BYTES = 4 * 2**20
"""What one part holds in memory before it is written as a file."""
LOG_BYTES_MAX = 16 * 2**20
"""A part that is no longer written keeps its last marks in memory, and so the log since then on disk. Beyond this size
they are written to a file, and the log is deleted."""
CACHE_BYTES = 32 * 2**20
"""Blocks of files that the process holds in memory, for all partitions and parts together."""
FILTER_BITS = 10
"""Bits per key of the filters: one of a hundred misses looks into a file."""
SLOTS_MAX = 1000
VERSION = 1
_NOTE = b"note"
_cache = Cache(CACHE_BYTES)


class IndexNote(msgspec.Struct, array_like=True):
    """What an index knows of itself."""

    version: int
    topic_id: str
    offset: int
    latest_us: int


class RocksIndexes:
    """The folder of one instance: the first subfolder that no other instance uses.

    `folder` empty: a temporary one, removed at the end.
    """

    def __init__(self, folder: Path | None, window_us: int) -> None:
        self._part_us = max(1, window_us // PARTS)
        self._temporary = folder is None
        root = Path(tempfile.mkdtemp(prefix="semel-dedup-")) if folder is None else folder
        self.path: Path
        try:
            self.path, self._lock = _take_slot(root)
        except OSError as error:
            raise StoreRefused(f"the folder {root} for the local index cannot be used: {error}") from error
        self._root = root

    def open(self, partition: int, topic_id: str, low: int, high: int) -> "RocksIndex":
        """Open the index of a partition, or start a new one at `low`."""
        path = self.path / str(partition)
        if path.exists():
            try:
                found = RocksIndex(path, self._part_us)
            except Exception as error:  # noqa: BLE001 - whatever the database raises: it is only a copy
                _log.warning("the index %s cannot be read (%s); it is built again", path, error)
            else:
                note = found.note
                same = topic_id and note.topic_id == topic_id and note.version == VERSION
                if same and low <= note.offset <= high:
                    return found
                _log.info("the index %s is of another topic or too old; it is built again", path)
                found.close()
            shutil.rmtree(path)
        path.mkdir(parents=True)
        return RocksIndex(path, self._part_us, IndexNote(VERSION, topic_id, low, 0))

    def close(self) -> None:
        """Let another instance use the folder."""
        os.close(self._lock)
        if self._temporary:
            shutil.rmtree(self._root, ignore_errors=True)


def _take_slot(root: Path) -> tuple[Path, int]:
    for number in range(SLOTS_MAX):
        path = root / str(number)
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        return path, descriptor
    raise OSError(f"{SLOTS_MAX} instances use it")


class RocksIndex:
    """The marks of one partition."""

    def __init__(self, path: Path, part_us: int, note: IndexNote | None = None) -> None:
        """Open an index, or create it with the given note."""
        self._path = path
        self._part_us = part_us
        parts = [] if note is not None else [name for name in Rdict.list_cf(str(path)) if name != "default"]
        self._db: Any = Rdict(str(path), _options(), column_families={name: _options() for name in parts})
        self._parts: dict[tuple[int, int], Any] = {}
        """The parts by their first time and the one behind their last, the latest first."""
        self._handles: dict[tuple[int, int], Any] = {}
        for name in parts:
            self._take_part(name, self._db.get_column_family(name))
        if note is None:
            stored = self._db.get(_NOTE)
            if stored is None:
                self.close()
                raise ValueError("it has no note")
            note = msgspec.msgpack.decode(stored, type=IndexNote)
        self.note: IndexNote = note

    @property
    def offset(self) -> int:
        """The offset of the marks topic up to which it is true."""
        return self.note.offset

    @property
    def latest_us(self) -> int:
        """The latest time of all marks that it has seen."""
        return self.note.latest_us

    def find(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Return the packed mark of each digest, from the latest part that has one."""
        if not digests or not self._parts:
            return [None] * len(digests)
        latest, *older = self._parts.values()
        found: list[bytes | None] = latest.get(list(digests))
        for part in older:
            missing = [at for at, packed in enumerate(found) if packed is None]
            if not missing:
                break
            for at, packed in zip(missing, part.get([digests[at] for at in missing]), strict=True):
                found[at] = packed
        return found

    def add(self, marks: Mapping[bytes, bytes], offset: int, over_us: int) -> None:
        """Write marks and offset in one batch, then drop the parts that are over. Raises `StoreUnavailable`."""
        latest_us = self.note.latest_us
        by_part: Mapping[tuple[int, int], Iterable[tuple[bytes, bytes]]] = {}
        if marks:
            first_us = unpack_mark(min(marks.values())).at_us
            last_us = unpack_mark(max(marks.values())).at_us
            latest_us = max(latest_us, last_us)
            span = self._span_of(first_us)
            one_part = first_us >= over_us and span == self._span_of(last_us)
            by_part = {span: marks.items()} if one_part else self._divide(marks, over_us)
        note = IndexNote(VERSION, self.note.topic_id, offset, latest_us)
        batch = WriteBatch(raw_mode=True)
        put = batch.put
        put(_NOTE, msgspec.msgpack.encode(note))
        try:
            for span, entries in by_part.items():
                handle = self._handle(span)
                for digest, packed in sorted(entries):  # neighbours share the way through the list in memory
                    put(digest, packed, handle)
            self._db.write(batch)
        except Exception as error:
            raise StoreUnavailable(f"the index {self._path} cannot be written: {error}") from error
        self.note = note
        for span in [span for span in self._parts if span[1] <= over_us]:
            del self._parts[span], self._handles[span]
            self._db.drop_column_family(_name(span))

    def _divide(
        self, marks: Mapping[bytes, bytes], over_us: int
    ) -> Mapping[tuple[int, int], list[tuple[bytes, bytes]]]:
        """Return the marks that are not over, by the part of the window."""
        by_part: defaultdict[tuple[int, int], list[tuple[bytes, bytes]]] = defaultdict(list)
        for digest, packed in marks.items():
            at_us = unpack_mark(packed).at_us
            if at_us >= over_us:
                by_part[self._span_of(at_us)].append((digest, packed))
        return by_part

    def _span_of(self, at_us: int) -> tuple[int, int]:
        for span in self._parts:  # a part that an earlier window made keeps its length
            if span[0] <= at_us < span[1]:
                return span
        first_us = at_us - at_us % self._part_us
        return first_us, first_us + self._part_us

    def _handle(self, span: tuple[int, int]) -> Any:
        if span not in self._handles:
            name = _name(span)
            self._take_part(name, self._db.create_column_family(name, _options()))
        return self._handles[span]

    def _take_part(self, name: str, part: Any) -> None:
        first, _, behind = name.partition("-")
        span = int(first), int(behind)
        self._handles[span] = self._db.get_column_family_handle(name)
        self._parts[span] = part
        self._parts = dict(sorted(self._parts.items(), key=lambda item: item[0][1], reverse=True))

    def size_bytes(self) -> int:
        """Return the size of its files."""
        total = 0
        for each in self._path.iterdir():
            with suppress(FileNotFoundError):  # compacted meanwhile
                total += each.stat().st_size
        return total

    def close(self) -> None:
        """Close the database; another process may open it then."""
        self._handles.clear()
        for part in self._parts.values():
            part.close()
        self._parts.clear()
        self._db.close()


def _name(span: tuple[int, int]) -> str:
    return f"{span[0]}-{span[1]}"


def _options() -> Any:
    options = Options(raw_mode=True)
    options.create_if_missing(create_if_missing=True)
    table = BlockBasedOptions()
    table.set_block_cache(_cache)
    table.set_bloom_filter(FILTER_BITS, block_based=False)
    options.set_block_based_table_factory(table)
    options.set_memtable_whole_key_filtering(whole_key_filter=True)
    options.set_memtable_prefix_bloom_ratio(0.1)
    options.set_write_buffer_size(BUFFER_BYTES)
    options.set_max_total_wal_size(LOG_BYTES_MAX)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(2**20)
    options.set_stats_dump_period_sec(0)
    return options
