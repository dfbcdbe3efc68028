"""Which addresses a webhook may be sent to: none inside a private network, whatever a name resolves to."""

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from msgspec import Struct

from semel.errors import PolicyInvalid

__all__ = ["AddressRefused", "Allowed", "checked_address", "is_public"]

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
    """The name leads to where a webhook must not go."""


class Allowed(Struct, frozen=True):
    """The only targets there may be: hosts by name (`*.example.com`: all below it), addresses by network."""

    names: tuple[str, ...] = ()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def of(cls, given: Sequence[str]) -> "Allowed":
        """From names and networks such as `10.1.0.0/16`. Raises `PolicyInvalid`."""
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
                        f"{each!r} is no target to allow; write a host, *.example.com or a network such as 10.1.0.0/16"
                    ) from None
                names.append(name)
        return cls(tuple(names), tuple(networks))

    def names_host(self, host: str) -> bool:
        """Whether the name may be called at all."""
        host = host.lower().rstrip(".")
        return not self.names or any(
            host.endswith(name[1:]) if name.startswith("*.") else host == name for name in self.names
        )

    def holds(self, address: str, *, private: bool) -> bool:
        """Whether the address may be called: by the networks that are named, else if it is public or `private`."""
        if not self.networks:
            return private or is_public(address)
        found = ip_address(address.partition("%")[0])
        return any(found.version == each.version and found in each for each in self.networks)


async def checked_address(host: str, port: int, *, private: bool, allowed: Allowed) -> str:
    """An address of the host, resolved once; connect to it and to no other.

    Raises `AddressRefused` where the host or any of its addresses is not allowed, and `OSError` where it has none.
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
    """Whether the address is anybody's to reach, also when it is one of the older kind in another form."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = _inner(address)
        if inner:
            return all(is_public(str(each)) for each in inner)
    if any(address.version == each.version and address in each for each in _SPECIAL):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _inner(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that this one stands for: mapped, 6to4, Teredo (its server and its client), NAT64."""
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if address.teredo is not None:
        return address.teredo
    if int(address) & _NAT64_MASK == _NAT64:
        return (IPv4Address(int(address) & 0xFFFFFFFF),)
    return ()
