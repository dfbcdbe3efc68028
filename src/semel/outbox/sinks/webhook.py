"""A sink that calls a webhook: signed by Standard Webhooks, public addresses only, no redirects."""

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import httpx2
from msgspec import Struct

from semel.core.relay_flow import NotPublished, OutboxRow, Published, PublishRefused, Sent
from semel.errors import PolicyInvalid
from semel.ingest.signing import SECRETS_MAX, signatures, signer_of
from semel.outbox.message import attributes
from semel.outbox.sinks import in_turns
from semel.runtime.urls import parse_url, port_of

__all__ = ["AddressRefused", "Allowed", "WebhookSink", "from_url", "is_public", "resolve_address"]

_SPECIAL = tuple(
    map(
        ip_network,
        (
            "192.0.0.0/24",  # protocol assignments, also those that are routed
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # AMT
            "192.88.99.0/24",  # 6to4 relays
            "192.175.48.0/24",  # AS112
            "::/96",  # IPv4 in IPv6, deprecated
            "64:ff9b:1::/48",  # NAT64 of a private network
            "100::/32",  # discard, dummy
            "2001::/23",  # protocol assignments; Teredo is looked into before
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
            "5f00::/16",  # segment routing
            "fec0::/10",  # site-local, deprecated
        ),
    )
)
"""Special-use addresses that some versions of Python call global: the registries of RFC 6890 and what came after."""
_NAT64 = 0x0064FF9B << 96
_NAT64_MASK = ((1 << 96) - 1) << 32


class AddressRefused(Exception):
    """The host resolves to an address that is not allowed."""


class Allowed(Struct, frozen=True):
    """The allowed targets: hosts by name (`*.example.com`: all below it), addresses by network."""

    names: tuple[str, ...] = ()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def of(cls, given: Sequence[str]) -> "Allowed":
        """Parse names and networks such as `10.1.0.0/16`. Raises `PolicyInvalid`."""
        names: list[str] = []
        networks: list[IPv4Network | IPv6Network] = []
        for each in given:
            try:
                networks.append(ip_network(each))
            except ValueError:
                name = each.lower().rstrip(".")
                bare = name.removeprefix("*.")
                if not bare or any(one in bare for one in "*/:@ ") or bare.replace(".", "").isdigit():
                    raise PolicyInvalid(
                        f"{each!r} is not a valid target; write a host, *.example.com or a network such as 10.1.0.0/16"
                    ) from None
                names.append(name)
        return cls(tuple(names), tuple(networks))

    def names_host(self, host: str) -> bool:
        """Whether the name is allowed."""
        host = host.lower().rstrip(".")
        return not self.names or any(
            host.endswith(name[1:]) if name.startswith("*.") else host == name for name in self.names
        )

    def holds(self, address: str, *, private: bool) -> bool:
        """Whether the address is allowed: by the given networks, else if it is public or `private`."""
        if not self.networks:
            return private or is_public(address)
        found = ip_address(address.partition("%")[0])
        return any(found.version == each.version and found in each for each in self.networks)


async def resolve_address(host: str, port: int, *, private: bool, allowed: Allowed) -> str:
    """Resolve the host once and return an address; connect only to it.

    Raises `AddressRefused` if the host or any of its addresses is not allowed, and `OSError` if it has none.
    """
    if not allowed.names_host(host):
        raise AddressRefused(f"{host} is not among the hosts that are allowed")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not allowed.holds(address, private=private):
            why = "in no network that is allowed" if allowed.networks else "not a public address"
            raise AddressRefused(f"{host} leads to {address}, which is {why}")
    if not addresses:
        raise OSError(f"{host} has no address")
    return addresses[0]


def is_public(text: str) -> bool:
    """Whether the address is public, including IPv4 addresses inside IPv6 forms."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = _inner(address)
        if inner:
            return all(is_public(str(each)) for each in inner)
    if any(address.version == each.version and address in each for each in _SPECIAL):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _inner(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """Return the IPv4 addresses inside this one: mapped, 6to4, Teredo (server and client), NAT64."""
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if address.teredo is not None:
        return address.teredo
    if int(address) & _NAT64_MASK == _NAT64:
        return (IPv4Address(int(address) & 0xFFFFFFFF),)
    return ()


WAIT_S = 10.0
"""The timeout of the connection, and of each part of an answer."""
CALL_MAX_S = 30.0
"""The timeout of a whole call, against targets that send a byte now and then."""
ANSWER_BYTES_MAX = 64 * 1024
REASON_CHARS_MAX = 200
CALLS_MAX = 16
"""Calls at once."""
_MESSAGE_REFUSED = frozenset((400, 409, 411, 413, 415, 422))
"""Statuses about one message; the others are about the target."""


class WebhookSink:
    """Calls one target. `private=True` allows private networks and plain HTTP: for tests and internal targets.

    `allow`: the allowed hosts and networks; a given network may be private. `secrets`: `whsec_`
    for HMAC signatures (`v1`), `whsk_` for ed25519 signatures, which the receiver can only verify (`v1a`).
    A 2xx is a confirmation. Other answers, timeouts and refused addresses count as attempts.
    """

    ordered: bool = True
    batch_max: int = 64

    def __init__(
        self,
        url: str,
        secrets: Sequence[str],
        *,
        private: bool = False,
        allow: Sequence[str] = (),
        wait_s: float = WAIT_S,
        call_max_s: float = CALL_MAX_S,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        parts = parse_url(url)
        if parts.scheme != "https" and not (private and parts.scheme == "http"):
            raise PolicyInvalid(
                "a webhook needs https://; http:// is for private targets, which --private allows"
            )
        if parts.username is not None or parts.password is not None or not parts.hostname or parts.fragment:
            raise PolicyInvalid("a webhook's URL has a host, and neither user nor password nor fragment")
        if not 1 <= len(secrets) <= SECRETS_MAX:
            raise PolicyInvalid(f"a webhook needs 1 to {SECRETS_MAX} secrets to sign with, the newest first")
        self._signers = [signer_of(secret) for secret in secrets]
        self._allowed = Allowed.of(allow)
        self._parts = parts
        self._host: str = parts.hostname
        self._port: int = port_of(parts, 443 if parts.scheme == "https" else 80)
        self.name: str = f"{parts.scheme}://{self._host}:{self._port}{parts.path}"
        self._private = private
        self._wait_s = wait_s
        self._call_max_s = call_max_s
        self._ssl = ssl_context
        self._client: httpx2.AsyncClient | None = None

    async def open(self) -> None:
        """Nothing is called yet."""
        self._client = httpx2.AsyncClient(
            verify=self._ssl or True,
            follow_redirects=False,
            timeout=self._wait_s,
            trust_env=False,
            limits=httpx2.Limits(max_connections=CALLS_MAX),
        )

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def publish(self, rows: Sequence[OutboxRow]) -> list[Sent]:
        """Make several calls at once; after a failure of the target, start no more."""
        try:
            address = await resolve_address(
                self._host, self._port, private=self._private, allowed=self._allowed
            )
        except AddressRefused as error:
            return [PublishRefused(str(error))] * len(rows)
        except OSError as error:
            return [PublishRefused(f"{self._host} is not found: {error}")] * len(rows)
        room = asyncio.Semaphore(CALLS_MAX)
        unwell = False

        async def call(row: OutboxRow) -> Sent:
            nonlocal unwell
            async with room:
                if unwell:
                    return NotPublished("the target has refused another message")
                sent = await self._call(address, row)
                if isinstance(sent, PublishRefused) and not sent.of_message:
                    unwell = True
                return sent

        return await in_turns(rows, call)

    async def _call(self, address: str, row: OutboxRow) -> Sent:
        try:
            async with asyncio.timeout(self._call_max_s):
                return await self._answer(address, row)
        except TimeoutError:
            return PublishRefused(f"no whole answer within {self._call_max_s:g} s")
        except httpx2.TimeoutException as error:
            return PublishRefused(f"no answer within {self._wait_s:g} s: {type(error).__name__}")
        except (httpx2.HTTPError, ssl.SSLError, OSError) as error:
            return PublishRefused(f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX])

    async def _answer(self, address: str, row: OutboxRow) -> Sent:
        assert self._client is not None
        host = f"[{address}]" if ":" in address else address
        path = self._parts.path or "/"
        query = f"?{self._parts.query}" if self._parts.query else ""
        extensions: dict[str, Any] = {"sni_hostname": self._host}
        async with self._client.stream(
            "POST",
            f"{self._parts.scheme}://{host}:{self._port}{path}{query}",
            content=row.payload,
            headers=self._headers(row),
            extensions=extensions,
        ) as response:
            size, begun = 0, b""
            async for piece in response.aiter_raw():
                size += len(piece)
                begun = (begun + piece)[:REASON_CHARS_MAX]
                if size > ANSWER_BYTES_MAX:
                    break
            status = response.status_code
        if 200 <= status < 300:  # noqa: PLR2004 - what HTTP calls success
            return Published()
        said = begun.decode(errors="replace").strip()
        return PublishRefused(
            f"answered {status}: {said}".rstrip(": "), of_message=status in _MESSAGE_REFUSED
        )

    def _headers(self, row: OutboxRow) -> dict[str, str]:
        timestamp = int(time.time())
        headers = dict(row.headers)
        for name, value in attributes(row).items():
            headers[f"ce-{name}"] = _percent(value)
        if row.traceparent is not None:
            headers["traceparent"] = row.traceparent
        default = 443 if self._parts.scheme == "https" else 80
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return {
            **headers,
            "host": shown if self._port == default else f"{shown}:{self._port}",
            "content-type": row.content_type,
            "user-agent": "semel",
            "accept-encoding": "identity",
            "webhook-id": row.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signatures(self._signers, row.id, timestamp, row.payload),
        }


def _percent(value: str) -> str:
    """Percent-encode everything but printable ASCII, as the HTTP binding of CloudEvents requires."""
    return "".join(
        each if "!" <= each <= "~" and each not in '"%' else "".join(f"%{byte:02X}" for byte in each.encode())
        for each in value
    )


def from_url(
    url: str, *, secrets: Sequence[str] = (), private: bool = False, allow: Sequence[str] = ()
) -> WebhookSink:
    """`https://host/path`, without secrets."""
    return WebhookSink(url, secrets, private=private, allow=allow)
