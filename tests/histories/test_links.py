"""A link that is parted lets nothing pass; a namespace hands on later what was sent meanwhile, a proxy does not."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.services.links import Link, namespace_link, proxy_link

ECHO = """
import socket, sys
line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for word in sys.stdin:
    line.sendall(word.encode())
"""
LINKS = [(proxy_link, b""), *([(namespace_link, b"meanwhile\n")] if os.geteuid() == 0 else [])]


@pytest.mark.service
@pytest.mark.parametrize(("make", "later"), LINKS)
def test_nothing_passes_while_a_worker_is_parted(
    make: Callable[[int], AbstractContextManager[Link]], later: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, make(server.getsockname()[1]) as link:
        command = [*link.prefix, sys.executable, "-c", ECHO, link.host, str(link.port)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert worker.stdin is not None
        try:
            line, _ = server.accept()
            with line:
                print("before", file=worker.stdin, flush=True)
                assert line.recv(100) == b"before\n"
                link.part()
                print("meanwhile", file=worker.stdin, flush=True)
                line.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    line.recv(100)
                link.join()
                line.settimeout(30)
                assert line.recv(100) == later
        finally:
            worker.kill()
            worker.wait()
            worker.stdin.close()
