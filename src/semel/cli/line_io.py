"""Lines from files and pipes, plain or gzipped, in blocks of bounded size; and lines to a file or pipe."""

import gzip
import io
import os
import select
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from semel.cli.output import FAILED, USAGE, CommandExit

__all__ = ["Block", "LineReader", "LineWriter"]

BLOCK_BYTES = 4 * 1024 * 1024
"""The size of a block: about ten thousand lines, enough to share a transaction and few enough to repeat."""
LINGER_S = 0.1
"""How long a block collects from a pipe before its lines are passed on."""
_GZIP_MAGIC = b"\x1f\x8b"
_TAIL_BYTES = 64 * 1024


class Block(msgspec.Struct, frozen=True, gc=False):
    """Whole lines of one source. `torn`: a part of a line that is too long."""

    source: str
    number: int
    """The number of the first line, from 1."""
    body: bytes
    """Ends with a line feed, unless it is torn."""
    torn: bool = False


class LineReader:
    """Reads several sources, one after the other, in blocks. `-` is stdin.

    Memory: one block and one line of at most `line_bytes_max`, whatever the size of the sources.
    """

    def __init__(self, names: Iterable[str], *, line_bytes_max: int) -> None:
        self._names = list(names)
        self._line_bytes_max = line_bytes_max
        self._source: _Source | None = None
        self._before_bytes = 0

    @property
    def total_bytes(self) -> int | None:
        """The size of all sources together; `None` if one of them is a pipe."""
        try:
            sizes = [Path(name).stat() for name in self._names if name != "-"]
        except OSError:
            return None
        if len(sizes) < len(self._names) or not all(stat.S_ISREG(each.st_mode) for each in sizes):
            return None
        return sum(each.st_size for each in sizes)

    @property
    def position_bytes(self) -> int:
        """How much of the sources has been read, before unpacking."""
        return self._before_bytes + (0 if self._source is None else self._source.taken_bytes)

    def __iter__(self) -> Iterator[Block]:
        for name in self._names:
            shown = "stdin" if name == "-" else name
            raw = io.FileIO(sys.stdin.fileno(), closefd=False) if name == "-" else io.FileIO(name)
            try:
                self._source = source = _Source(raw)
                yield from self._blocks(shown, source.read_block)
                self._before_bytes += source.taken_bytes
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise CommandExit(f"{shown}: the gzip data is damaged or cut off: {error}", FAILED) from error
            finally:
                self._source = None
                raw.close()

    def _blocks(self, source: str, read: Callable[[], bytes]) -> Iterator[Block]:
        number, begun, begun_bytes, torn = 1, list[bytes](), 0, False
        while data := read():
            cut = data.rfind(b"\n") + 1
            if torn and (cut := data.find(b"\n") + 1):
                yield Block(source, number, data[:cut], torn=True)
                number, torn, data = number + 1, False, data[cut:]
                cut = data.rfind(b"\n") + 1
            if cut:
                body = b"".join((*begun, data[:cut]))
                yield Block(source, number, body)
                number += body.count(b"\n")
                begun, begun_bytes, data = [], 0, data[cut:]
            begun.append(data)
            begun_bytes += len(data)
            if torn or begun_bytes > self._line_bytes_max:
                torn = True
                yield Block(source, number, b"".join(begun), torn=True)
                begun, begun_bytes = [], 0
        if torn:
            yield Block(source, number, b"\n", torn=True)
        elif last := b"".join(begun):
            yield Block(source, number, last + b"\n")


class _Source:
    """One source, read in pieces and decompressed if it is gzipped."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self.taken_bytes = 0
        self._head = self._take(BLOCK_BYTES)
        while 0 < len(self._head) < len(_GZIP_MAGIC) and (more := self._take(BLOCK_BYTES)):
            self._head += more
        self._regular = stat.S_ISREG(os.fstat(raw.fileno()).st_mode)
        self._read: Callable[[int], bytes] = self.read
        if self._head.startswith(_GZIP_MAGIC):
            self._read = gzip.GzipFile(fileobj=self, mode="rb").read1  # type: ignore[call-overload]

    def read(self, size: int = -1) -> bytes:
        """Return at most this many bytes."""
        if not self._head:
            return self._take(size)
        given, self._head = self._head[:size], self._head[size:]
        return given

    def _take(self, size: int) -> bytes:
        data = self._raw.read(size) or b""
        self.taken_bytes += len(data)
        return data

    def read_block(self) -> bytes:
        """Return a block. From a pipe it takes what arrives within a short time, so that lines are not delayed."""
        parts = [self._read(BLOCK_BYTES)]
        size, until = len(parts[0]), time.monotonic() + LINGER_S
        while parts[-1] and size < BLOCK_BYTES and (self._regular or self._has_more(until)):
            parts.append(self._read(BLOCK_BYTES - size))
            size += len(parts[-1])
        return b"".join(parts)

    def _has_more(self, until: float) -> bool:
        left_s = until - time.monotonic()
        return left_s > 0 and bool(select.select((self._raw,), (), (), left_s)[0])


class LineWriter:
    """Writes lines to stdout, or appends them to a file. Written lines survive the process."""

    def __init__(self, path: Path | None, sources: Iterable[str], say: Callable[[str], None]) -> None:
        self._own = path is not None
        self._name = "stdout" if path is None else str(path)
        self._fd = sys.stdout.fileno() if path is None else _append_to(path, sources, say)
        self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)

    def write(self, data: bytes) -> None:
        """Write all bytes. Raises `BrokenPipeError` when the reader is gone."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            error.filename = self._name
            raise

    def settle(self) -> None:
        """Flush a file to disk, so that the lines survive a power failure."""
        if self._regular:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        if self._own:
            os.close(self._fd)


def _append_to(path: Path, sources: Iterable[str], say: Callable[[str], None]) -> int:
    created = not path.exists()
    if not created and any(name != "-" and _is_same(path, name) for name in sources):
        raise CommandExit(f"{path} is read and written at once; choose another file for --output", USAGE)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    if created:
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    elif stat.S_ISREG(os.fstat(fd).st_mode):
        _cut_partial_line(fd, path, say)
    return fd


def _is_same(path: Path, name: str) -> bool:
    return Path(name).exists() and path.samefile(name)


def _cut_partial_line(fd: int, path: Path, say: Callable[[str], None]) -> None:
    """Cut half a line off the end, left by a killed run. Its chunk was not marked and comes again."""
    end = os.fstat(fd).st_size
    start = max(0, end - _TAIL_BYTES)
    tail = os.pread(fd, end - start, start)
    if not tail or tail.endswith(b"\n"):
        return
    while start and b"\n" not in tail:
        before = max(0, start - _TAIL_BYTES)
        tail, start = os.pread(fd, start - before, before) + tail, before
    half = tail[tail.rfind(b"\n") + 1 :]
    if half.startswith(b"{") and not _is_json(half):
        os.ftruncate(fd, end - len(half))
        say(f"cut {len(half)} bytes of an unfinished line off the end of {path}")
    else:
        os.write(fd, b"\n")


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
