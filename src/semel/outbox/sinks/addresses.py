"""Which addresses a webhook may be sent to: none inside a private network, whatever a name resolves to."""

import asyncio
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

__all__ = ["AddressRefused", "checked_address", "is_public"]

_NAT64 = 0x0064FF9B << 96
_NAT64_MASK = ((1 << 96) - 1) << 32


class AddressRefused(Exception):
    """The name leads to where a webhook must not go."""


async def checked_address(host: str, port: int, *, private: bool) -> str:
    """An address of the host, resolved once; connect to it and to no other.

    Raises `AddressRefused` where any of its addresses is not public, unless `private`, and `OSError` where it has none.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if not private:
        for address in addresses:
            if not is_public(address):
                raise AddressRefused(f"{host} leads to {address}, which is not a public address")
    if not addresses:
        raise OSError(f"{host} has no address")
    return addresses[0]


def is_public(text: str) -> bool:
    """Whether the address is anybody's to reach, also when it is one of the older kind in another form."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = _inner(address)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast and not address.is_reserved


def _inner(address: IPv6Address) -> IPv4Address | None:
    """The older kind of address that this one stands for: mapped, 6to4, Teredo, NAT64."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if int(address) & _NAT64_MASK == _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None
