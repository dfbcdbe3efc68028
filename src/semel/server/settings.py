"""Settings of the service: frozen, keyword-only, checked when made; and limits on all input."""

import ipaddress
from typing import Literal, TypeAlias

from msgspec import Struct, field

from semel.errors import PolicyInvalid
from semel.keys.limits import check_consumer
from semel.policy import LEASE_MAX_S, LEASE_MIN_S
from semel.windows import FOREVER_US, duration_us

__all__ = ["Audit", "Auth", "Limits", "ServeSettings", "is_loopback"]

Auth: TypeAlias = Literal["tokens", "none"]
Audit: TypeAlias = Literal["operators", "all"]

PORT = 8787
KIB = 1024
MIB = 1024 * KIB
US = 1_000_000


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of one caller. A request above a limit is refused, and nothing of it is executed."""

    body_bytes_max: int = 4 * MIB
    """The size of a request, and of a message on a WebSocket: 413."""
    batch_items_max: int = 1000
    """Items, claims or events in one request, and keys in one mark: 413."""
    value_bytes_max: int = 320 * KIB
    """The size of a value, a journaled payload or a step: 413. At most 1 MiB."""
    lease_min_us: int = US
    lease_max_us: int = 15 * 60 * US
    """The longest lease: a caller that never completes blocks others no longer than this: 422."""
    window_max_us: int = FOREVER_US
    """The longest window: what a caller stores takes room for as long as this: 422."""
    rate_per_s: float = 1000.0
    """Requests of one token, with a burst of twice as many; 0: no bound. 429."""
    items_per_s: float = 100_000.0
    """Items, claims and events of one tenant, with a burst of twice as many; 0: no bound. 429."""
    bytes_per_s: float = 64.0 * MIB
    """Bytes sent and received by one tenant, with a burst of twice as many; 0: no bound. 429."""
    store_share: float = 2.0
    """Seconds of the store's time per second that one tenant's requests may take, in parallel; 0: no bound. 429."""
    scan_share: float = 0.5
    """The same for its counts and scans alone; 0: no bound. 429."""
    answer_bytes_max: int = 8 * MIB
    """The stored values in one answer. Items that do not fit are refused and must be sent again: 413."""
    consumers_max: int = 1000
    """Consumers of one tenant, and stored windows: 409."""
    steps_max: int = 1000
    """Steps of one record; together they may have four times `value_bytes_max`: 413."""
    renewals_max: int = 60
    """Renewals of one claim within its lease, as seen by this instance; clients of semel need 20 at most: 429."""
    live_claims_max: int = 10_000
    """Claims that one token holds at a time, as seen by this instance: 429."""
    body_wait_s: float = 30.0
    """The time for a request's body to arrive: 408."""
    head_wait_s: float = 15.0
    """The time for a request's head to arrive, before the connection is closed."""
    write_wait_s: float = 30.0
    """The time for a client to read its response, before the connection is closed."""
    connections_max: int = 2000
    """The most connections at once; more get 503. Limited by the files that the process may open."""

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[float, float]] = {
            "body_bytes_max": (KIB, 64 * MIB),
            "batch_items_max": (1, 10_000),
            "value_bytes_max": (1, MIB),
            "lease_min_us": (1, LEASE_MAX_S * US),
            "lease_max_us": (self.lease_min_us, LEASE_MAX_S * US),
            "window_max_us": (1, FOREVER_US),
            "rate_per_s": (0, 1e6),
            "items_per_s": (0, 1e9),
            "bytes_per_s": (0, 1e12),
            "store_share": (0, 100),
            "scan_share": (0, 100),
            "answer_bytes_max": (KIB, 256 * MIB),
            "consumers_max": (1, 1_000_000),
            "steps_max": (1, 1_000_000),
            "renewals_max": (20, 1_000_000),
            "live_claims_max": (1, 1_000_000),
            "body_wait_s": (0.01, 3600),
            "head_wait_s": (0.01, 3600),
            "write_wait_s": (0.01, 3600),
            "connections_max": (1, 100_000),
        }
        for name, (least, most) in bounds.items():
            if not least <= getattr(self, name) <= most:
                raise PolicyInvalid(
                    f"{name} is {getattr(self, name):g}; it must be between {least:g} and {most:g}"
                )


class ServeSettings(Struct, frozen=True, kw_only=True):
    """The address, authentication, trusted proxies, and the processing of events."""

    store: str = "sqlite:///semel.db"
    host: str = "127.0.0.1"
    port: int = PORT
    """0: any that is free."""
    auth: Auth = "tokens"
    """`none`: every user of this computer may do anything. Only on loopback, on a store that never had a token."""
    first_token: bool = False
    """Whether to make a token of an admin of all tenants, on loopback, for a store that never had one."""
    audit: Audit = "operators"
    """`all`: also an entry for each request that writes, before it is carried out: one round trip more."""
    proxies: tuple[str, ...] = ()
    """Addresses and networks of the proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed."""
    tls_cert: str = ""
    tls_key: str = ""
    """PEM files; both or neither."""
    drain_s: float = 30.0
    """How long requests under way may take after SIGTERM."""
    unready_s: float = 0.0
    """How long to serve after SIGTERM while `/readyz` fails, so that a load balancer can notice."""
    events_consumer: str = "events"
    """The consumer of the events of `/v1/events`."""
    events_key: str = ""
    """The path of the id in an event's JSON; empty: CloudEvents, headers, and else the member `id`."""
    events_lease: str = "30s"
    """The lease of events: how soon another instance takes over after a crash."""
    errors: str = "keep"
    """What records keep of the errors of events: `keep`, `none`, or the `package.module:function` that redacts them."""
    handler: str = ""
    """`package.module:function`, called with each event."""
    sink: str = ""
    """The sink for each event, instead of a handler: a URL as of `semel relay --to`."""
    dead_letters: tuple[str, ...] = ()
    """Sources whose dead letters the dashboard lists and replays: URLs as of `semel consume --from`."""
    dashboard: bool = True
    """Pages at `/ui`, and the rollups in the store that they show."""
    persist: str = ""
    """The database whose table `events` gets a row for each event, after handler or sink: PostgreSQL or SQLite. With
    none of the three it is the store's own; if that is neither, an event is kept in its record."""
    events_table: str = "events"
    events_columns: str = ""
    """Column names for `event_id`, `type`, `payload` and `tenant`: `type=event_type,tenant=` (no tenants)."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_consumer(self.events_consumer)
        if not LEASE_MIN_S * US <= duration_us(self.events_lease) <= LEASE_MAX_S * US:
            raise PolicyInvalid(
                f"a lease of {self.events_lease} is out of bounds; use {LEASE_MIN_S * 1000:g}ms to 12h"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise PolicyInvalid("TLS needs both a certificate and its key: --tls-cert and --tls-key")
        if self.handler and self.sink:
            raise PolicyInvalid("events go to a handler or to a sink: give --handler or --sink, not both")
        if not 0 <= self.port < 2**16:
            raise PolicyInvalid(f"port is {self.port}; it must be between 0 and 65535")
        if self.auth == "none" and not is_loopback(self.host):
            raise PolicyInvalid(
                f"refusing to listen on {self.host} without authentication: anybody who reaches it could claim, read"
                " and forget; make a token with `semel token create` and leave --auth out"
            )
        if self.auth == "none" and self.proxies:
            raise PolicyInvalid("behind a proxy every host could come in: leave --auth none out, or --proxy")
        for proxy in self.proxies:
            _check_proxy(proxy)


def is_loopback(host: str) -> bool:
    """Whether only this computer can connect to that address. False for names other than localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_proxy(proxy: str) -> None:
    try:
        network = ipaddress.ip_network(proxy)
    except ValueError:
        raise PolicyInvalid(
            f"--proxy {proxy!r} is not an address; write an address or a network, such as 10.0.0.7 or 10.0.0.0/24"
        ) from None
    if not network.prefixlen:
        raise PolicyInvalid(f"--proxy {proxy!r} would trust every host; give the address of your proxy")
