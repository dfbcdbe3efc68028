"""A transaction pooler for tests: from `SEMEL_TEST_PGBOUNCER_URL`, an installed binary, or the package manager."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import psycopg

from tests.services import postgres, programs, server
from tests.services.server import Missing

CONFIG = """
[databases]
{name} = host={host} port={port} dbname={name} user={user}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {servers}
"""
SERVERS = 3
"""So few that sessions are mixed up as soon as several clients are at work."""


@contextlib.contextmanager
def before(url: str) -> Iterator[str]:
    """The URL of a pooler that stands before this database."""
    given = programs.given("pgbouncer")  # in transaction mode, before a database in which schemas may be made
    if given:
        yield given
        return
    with server.folder() as folder:
        try:
            pid, at = _run(programs.find_or_install("pgbouncer"), urlsplit(url), folder)
        except Missing as missing:
            import pytest

            pytest.skip(f"no pgbouncer: {missing}")
        try:
            yield at
        finally:
            server.end(pid)


def _run(binary: str, behind: SplitResult, folder: Path) -> tuple[int, str]:
    port = server.free_port()
    config, log = folder / "pgbouncer.ini", folder / "pgbouncer.log"
    name = behind.path.strip("/")
    config.write_text(
        CONFIG.format(
            name=name, host=behind.hostname, port=behind.port, user=behind.username,
            listen=port, servers=SERVERS,
        ),
        encoding="utf-8",
    )  # fmt: skip
    pid = server.spawn([binary, str(config)], log, user=postgres.user())
    at = f"postgresql://anybody@127.0.0.1:{port}/{name}"

    def answers() -> bool:
        try:
            postgres.execute(at, "SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    server.await_ready(answers, "pgbouncer", log)
    return pid, at
