"""A filter on disk: written whole or not at all, and never trusted unless every byte is as it was written."""

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from struct import Struct as Form

import msgspec

from semel.errors import StoreRefused
from semel.stores.bloom.settings import BloomLayout

__all__ = ["Damaged", "load", "look", "save"]

MAGIC = b"semelblm"
VERSION = 1
_HEAD = Form(">8sHI32s")
"""Magic, version, length of what describes the filter, checksum of that length and of all that follows."""
_LENGTH = Form(">I")
_RBLOOM_HEAD = 8
"""rbloom begins with the number of its hashes."""


class Damaged(Exception):
    """The file is one of ours, and not as it was written."""


class _About(msgspec.Struct):
    layout: BloomLayout
    generations: list[tuple[int, int]]
    """Number and length of each."""


def save(path: Path, layout: BloomLayout, generations: dict[int, bytes]) -> None:
    """Write beside the file, make sure of it, and only then put it in its place."""
    described = msgspec.json.encode(
        _About(layout, [(number, len(bits)) for number, bits in generations.items()])
    )
    checksum = sha256(_LENGTH.pack(len(described)) + described)
    for bits in generations.values():
        checksum.update(bits)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with beside.open("xb") as file:
            file.write(_HEAD.pack(MAGIC, VERSION, len(described), checksum.digest()))
            file.write(described)
            for bits in generations.values():
                file.write(bits)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with suppress(FileNotFoundError):
            beside.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path, layout: BloomLayout) -> dict[int, bytes]:
    """The generations by number; none without a file. Raises `Damaged`, or `StoreRefused` for another's file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreRefused(f"{path} cannot be read: {error}") from error
    if content and not content.startswith(MAGIC[: len(content)]):
        raise StoreRefused(f"{path} is no filter of semel, and is left as it is; name another path")
    if len(content) < _HEAD.size:
        raise Damaged(f"{path} is cut short")
    _, version, length, checksum = _HEAD.unpack_from(content)
    if version != VERSION:
        raise StoreRefused(f"{path} was written by another version of semel; remove it, or name another path")
    body = memoryview(content)[_HEAD.size :]
    found_sum = sha256(_LENGTH.pack(length))
    found_sum.update(body)
    if found_sum.digest() != checksum:
        raise Damaged(f"{path} is not as it was written")
    about = msgspec.json.decode(bytes(body[:length]), type=_About)
    if about.layout != layout:
        raise StoreRefused(
            f"{path} holds a filter with other settings ({_shown(about.layout)}, not {_shown(layout)}); remove it,"
            " or name another path"
        )
    found: dict[int, bytes] = {}
    at = length
    for number, size in about.generations:
        found[number] = bytes(body[at : at + size])
        at += size
    return found


def look(bits: bytes) -> tuple[float, int]:
    """The share of bits that are set, and the number of hashes."""
    body = bits[_RBLOOM_HEAD:]
    return int.from_bytes(body).bit_count() / (8 * len(body)), int.from_bytes(bits[:_RBLOOM_HEAD], "little")


def _shown(layout: BloomLayout) -> str:
    return (
        f"capacity {layout.capacity}, window {layout.window_us / 1e6:g} s, error_rate {layout.error_rate},"
        f" steps {layout.steps}"
    )
