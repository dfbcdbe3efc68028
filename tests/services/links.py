"""A link between one worker and a server on this computer, which can be parted.

As root it is a network namespace: packets vanish, no connection ends, and what was sent arrives late or never.
Without root a proxy takes its place, which lets nothing pass, and ends the connections when it is joined again.
"""

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, Protocol

from semel.testing.proxy import Proxy
from tests.services import programs
from tests.services.server import Missing


class Link(Protocol):
    """What a worker reaches its server by."""

    @property
    def host(self) -> str:
        """The address that the worker connects to."""
        ...

    @property
    def port(self) -> int: ...

    @property
    def proxy(self) -> Proxy:
        """The server's end of the link: it can also cut single requests and replies."""
        ...

    @property
    def prefix(self) -> tuple[str, ...]:
        """What stands before the worker's command."""
        ...

    def part(self) -> None:
        """Let nothing pass from now on."""
        ...

    def join(self) -> None:
        """Let everything pass again."""
        ...


class ProxyLink(NamedTuple):
    """A link that a proxy parts."""

    proxy: Proxy
    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()

    @property
    def port(self) -> int:
        return self.proxy.port

    def part(self) -> None:
        self.proxy.mode = "blackhole"

    def join(self) -> None:
        self.proxy.mode = "pass"
        self.proxy.cut()  # what was sent meanwhile is gone


class NamespaceLink(NamedTuple):
    """A link out of a network namespace, by a pair of virtual devices."""

    name: str
    host: str
    proxy: Proxy

    @property
    def port(self) -> int:
        return self.proxy.port

    @property
    def prefix(self) -> tuple[str, ...]:
        return (programs.find_or_install("ip"), "netns", "exec", self.name)

    def part(self) -> None:
        run_ip(f"link set {self.name}a down")

    def join(self) -> None:
        run_ip(f"link set {self.name}a up")


def run_ip(words: str) -> None:
    """Run `ip` with these words. Raises `Missing` if it cannot be had or may not do that."""
    command = [programs.find_or_install("ip"), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"ip {words}: {done.stderr.strip()}")


@contextmanager
def namespace_link(port: int) -> Iterator[NamespaceLink]:
    """A namespace whose only way leads to the server at this port. Raises `Missing` without the right to make one."""
    if os.geteuid():
        raise Missing("only root may make network namespaces")
    name = f"semel{secrets.token_hex(3)}"
    net = secrets.randbelow(2**14) * 4  # 198.18.0.0/15 is set aside for tests of networks
    here, there = (f"198.18.{(net + each) >> 8}.{(net + each) & 255}" for each in (1, 2))
    with ExitStack() as stack:
        run_ip(f"netns add {name}")
        stack.callback(_remove, f"netns del {name}")  # its device goes with it, and the other end with that
        run_ip(f"link add {name}a type veth peer name {name}b netns {name}")
        stack.callback(_remove, f"link del {name}a")
        run_ip(f"addr add {here}/30 dev {name}a")
        run_ip(f"link set {name}a up")
        run_ip(f"-n {name} addr add {there}/30 dev {name}b")
        run_ip(f"-n {name} link set {name}b up")
        proxy = stack.enter_context(Proxy(port, listen=here))
        yield NamespaceLink(name, here, proxy)


def _remove(words: str) -> None:
    with suppress(Missing):
        run_ip(words)


@contextmanager
def proxy_link(port: int) -> Iterator[ProxyLink]:
    """A proxy in front of the server at this port."""
    with Proxy(port) as proxy:
        yield ProxyLink(proxy)


@contextmanager
def link_to(port: int) -> Iterator[Link]:
    """A link to the server at this port of this computer: a namespace if we may make one."""
    with ExitStack() as stack:
        try:
            link: Link = stack.enter_context(namespace_link(port))
        except Missing:
            link = stack.enter_context(proxy_link(port))
        yield link
