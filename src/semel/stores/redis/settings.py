"""Settings of the Redis store: the servers' addresses and the options, read from a URL and checked on creation."""

import re
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

from msgspec import Struct

from semel.errors import PolicyInvalid
from semel.runtime.urls import parse_url, struct_options

__all__ = ["RedisOptions", "parse", "without_password"]

Address: TypeAlias = tuple[str, int]
Topology: TypeAlias = Literal["server", "cluster", "sentinel"]

SCHEMES: dict[str, tuple[Topology, bool]] = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "valkey": ("server", False),
    "valkeys": ("server", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}
PORT, SENTINEL_PORT = 6379, 26379
PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
"""No braces: they would change the hash tag. No characters with a meaning in patterns."""
REPLICAS_MAX = 100
WAIT_MAX_S = 3600.0


class RedisOptions(Struct, frozen=True, kw_only=True):
    """Options of the store, without its address."""

    prefix: str = "semel"
    """The prefix of all keys: stores with different prefixes share a database and nothing else."""
    readable_keys: bool = True
    """False: keep only digests of keys, except for records that a user must be able to name."""
    allow_eviction: bool = False
    """Accept a server that may drop records when its memory is full: their effects may then happen again."""
    on_store_lost: Literal["continue", "fail"] = "continue"
    """What to do when the server loses its records while a client runs. It is logged in both cases."""
    wait_replicas: int = 0
    """Wait after each settle until this many replicas have it. Fewer are counted and logged; that is no error."""
    wait_replicas_s: float = 0.1
    wait_disk: bool = False
    """Wait after each settle until the master has it on disk, not only in the buffer of its append-only file."""
    wait_replica_disks: int = 0
    """Wait after each settle until this many replicas have it on disk."""
    wait_disk_s: float = 2.0
    """How long to wait for the disks. The server writes once a second, unless it is configured otherwise."""
    marks: Literal["plain", "compact"] = "plain"
    """How marks are stored: one key each, or compact sets with few bytes per mark that last up to twice the window."""
    marks_expected: int = 1_000_000
    """About how many compact marks a consumer makes in one window. With more, the store takes more sets by itself."""
    connect_s: float = 5.0
    answer_s: float = 10.0
    """How long to wait for a connection, and for an answer."""
    retry_s: float = 2.0
    """How long to retry while the server is loading, has no master, or is moving its keys."""
    ca_file: str = ""
    verify: bool = True
    cert_file: str = ""
    key_file: str = ""
    """TLS: the certificate authority, whether to verify the server, and a client certificate if the server asks."""
    sentinel_username: str = ""
    sentinel_password: str = ""

    def __post_init__(self) -> None:
        if not PREFIX.fullmatch(self.prefix):
            raise PolicyInvalid(
                f"prefix is {self.prefix!r}; it must be 1 to 64 letters, digits, '_', '.', ':' or '-'"
            )
        if self.marks_expected < 1:
            raise PolicyInvalid(f"marks_expected is {self.marks_expected}; it must be 1 or more")
        for name in ("wait_replicas", "wait_replica_disks"):
            if not 0 <= getattr(self, name) <= REPLICAS_MAX:
                raise PolicyInvalid(
                    f"{name} is {getattr(self, name)}; it must lie between 0 and {REPLICAS_MAX}"
                )
        for name in ("connect_s", "answer_s", "wait_replicas_s", "wait_disk_s", "retry_s"):
            if not 0 <= getattr(self, name) <= WAIT_MAX_S or (name != "retry_s" and not getattr(self, name)):
                raise PolicyInvalid(
                    f"{name} is {getattr(self, name)}; it must lie between 0 and {WAIT_MAX_S:g}"
                )
        waits_s = (self.wait_replicas_s if self.wait_replicas else 0) + (
            self.wait_disk_s if self.waits_for_disks else 0
        )
        if waits_s >= self.answer_s:
            raise PolicyInvalid(
                f"answer_s is {self.answer_s:g}; it must exceed the {waits_s:g} s that replicas and disks may take"
            )
        if bool(self.cert_file) != bool(self.key_file):
            raise PolicyInvalid("give both cert_file and key_file, or neither")

    @property
    def waits_for_disks(self) -> bool:
        """Whether a settle waits for a disk before it is answered."""
        return self.wait_disk or self.wait_replica_disks > 0

    @property
    def replicas_awaited(self) -> int:
        """How many replicas a settle waits for, in memory or on disk."""
        return max(self.wait_replicas, self.wait_replica_disks)


class RedisTarget(Struct, frozen=True, kw_only=True):
    """The address of the server, cluster or sentinels, and the login."""

    scheme: str
    topology: Topology
    tls: bool
    addresses: tuple[Address, ...]
    service: str = ""
    """The master's name in the sentinels' configuration."""
    db: int = 0
    username: str = ""
    password: str = ""

    @property
    def name(self) -> str:
        """The URL without the login and the options."""
        hosts = ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.addresses
        )
        service = f"/{self.service}" if self.service else ""
        return f"{self.scheme}://{hosts}{service}" + ("" if self.topology == "cluster" else f"/{self.db}")


def parse(url: str, given: dict[str, Any]) -> tuple[RedisTarget, RedisOptions]:
    """Parse the URL and the options. Raises `PolicyInvalid` for a bad URL or an unknown option."""
    parts = parse_url(url)
    shown = without_password(url)
    if parts.scheme not in SCHEMES or not parts.netloc or parts.fragment:
        raise PolicyInvalid(
            f"{shown!r} is not a Redis URL; write redis://host:6379/0, or one of {', '.join(SCHEMES)}"
        )
    topology, tls = SCHEMES[parts.scheme]
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    path = [unquote(part) for part in parts.path.split("/") if part]
    service = ""
    if topology == "sentinel":
        if not path:
            raise PolicyInvalid(f"{shown!r} does not name the master: redis+sentinel://host:26379/mymaster/0")
        service = path.pop(0)
    db = path.pop(0) if path else "0"
    if path or not db.isdigit() or (topology == "cluster" and db != "0"):
        raise PolicyInvalid(f"{shown!r}: a database is a number, and a cluster has only 0")
    options = struct_options(url, RedisOptions, given)
    if topology == "cluster" and options.marks == "compact":
        raise PolicyInvalid(f"{shown!r}: compact marks need a single server, not a cluster; use marks=plain")
    port = SENTINEL_PORT if topology == "sentinel" else PORT
    place = RedisTarget(
        scheme=parts.scheme,
        topology=topology,
        tls=tls,
        addresses=tuple(_address(shown, host, port) for host in hosts.split(",")),
        service=service,
        db=int(db),
        username=unquote(username),
        password=unquote(password),
    )
    return place, options


def without_password(url: str) -> str:
    """Return the URL with its passwords masked."""
    return re.sub(
        r"((?:^|[?&])\w*password=)[^&#]*", r"\1***", re.sub(r"(^[\w+]*:?//)[^/?#]*@", r"\1***@", url)
    )


def _address(shown: str, text: str, port: int) -> Address:
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:@]+))(?::(\d{1,5}))?", text)
    if match is None:
        raise PolicyInvalid(
            f"{shown!r}: {text!r} is not a host; write host or host:port, and a comma between two"
        )
    return match[1] or unquote(match[2]), int(match[3] or port)
