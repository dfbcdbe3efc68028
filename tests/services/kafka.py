"""A Kafka broker for tests, in KRaft mode: from `SEMEL_TEST_KAFKA_SERVERS`, or the real one by Maven and Java 17.

There are two releases: most tests use `kafka`, and `release("kafka-4")` makes everything here mean the other one.
"""

import os
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.services import java, programs, server
from tests.services.nats import answers
from tests.services.server import Missing, State

READY_S = 120.0
HEAP_MB = 384
PROTOCOLS = "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT,SASL:SASL_PLAINTEXT"
LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
RELEASES = ("kafka", "kafka-4")
"""Names in the table of programs."""

_release = RELEASES[0]


@contextmanager
def release(name: str) -> Iterator[None]:
    """Use the broker of this release for a while."""
    global _release  # noqa: PLW0603 - one test at a time in a process
    before, _release = _release, name
    try:
        yield
    finally:
        _release = before


def _shared() -> State:
    return server.shared(_release, partial(_start, _release))


def servers() -> str:
    """The one broker of this run; tests use topics of their own."""
    found: str = _shared()["servers"]
    return found


def admin() -> Any:
    """A client of this process that makes topics and asks about groups.

    It is shared and never ended. Each client has threads of its own, and one that the garbage collector ends inside a
    callback of that client waits for itself for ever, with a processor busy.
    """
    return _admin(servers(), os.getpid())


@cache
def _admin(address: str, _pid: int) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": address, "log_level": 0})


def secured() -> str:
    """Where the same broker asks for credentials (SASL_PLAINTEXT, PLAIN): user `semel`, password `secret`."""
    found: str | None = _shared().get("secured")
    if found is None:
        pytest.skip("the broker that was given has no such listener")
    return found


def behind_a_proxy() -> tuple[str, int]:
    """Where the same broker listens for a proxy, and the port at which it says that the proxy is.

    A client of Kafka connects to where the broker says that it is, so one test at a time can have this proxy.
    """
    found: tuple[str, int] | None = _shared().get("proxied")
    if found is None:
        pytest.skip("the broker that was given has no such listener")
    return found


def _start(name: str, folder: Path) -> State:
    given = programs.given(name)
    if given:
        return {"servers": given}
    run = java.command(name, HEAP_MB)
    port, control, guarded, behind, advertised = (server.free_port() for _ in range(5))
    settings = folder / "server.properties"
    settings.write_text(
        "\n".join(
            (
                "process.roles=broker,controller",
                "node.id=1",
                f"controller.quorum.voters=1@127.0.0.1:{control}",
                f"listeners={_listeners(PLAINTEXT=port, CONTROLLER=control, SASL=guarded, PROXIED=behind)}",
                f"advertised.listeners={_listeners(PLAINTEXT=port, SASL=guarded, PROXIED=advertised)}",
                "controller.listener.names=CONTROLLER",
                f"listener.security.protocol.map={PROTOCOLS}",
                "sasl.enabled.mechanisms=PLAIN",
                f'listener.name.sasl.plain.sasl.jaas.config={LOGIN} required user_semel="secret";',
                f"log.dirs={folder / 'data'}",
                "num.partitions=3",
                "auto.create.topics.enable=false",
                "offsets.topic.replication.factor=1",
                "offsets.topic.num.partitions=4",
                "transaction.state.log.replication.factor=1",
                "transaction.state.log.num.partitions=4",
                "transaction.state.log.min.isr=1",
                "group.min.session.timeout.ms=1000",
                "group.initial.rebalance.delay.ms=0",
                "transaction.abort.timed.out.transaction.cleanup.interval.ms=500",
            )
        )
    )
    id_ = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    cluster = id_.replace("-", "_")  # at its start, the tool would take it for an option
    formatted = subprocess.run(
        [*run, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)],
        capture_output=True, text=True, check=False, timeout=READY_S,
    )  # fmt: skip
    if formatted.returncode:
        raise Missing(f"the broker's storage cannot be made: {formatted.stderr[-1000:]}")
    log = folder / "log"
    pid = server.spawn([*run, "kafka.Kafka", str(settings)], log)
    server.await_ready(lambda: _is_ready(pid, port, log), name, log, READY_S)
    return {
        "servers": f"127.0.0.1:{port}",
        "secured": f"127.0.0.1:{guarded}",
        "proxied": (f"127.0.0.1:{behind}", advertised),
        "pids": [pid],
    }


def _listeners(**ports: int) -> str:
    return ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())


def _is_ready(pid: int, port: int, log: Path) -> bool:
    if not server.is_alive(pid):
        raise Missing(f"the broker ended: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")
    if not answers(port):
        return False
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    member = Consumer({"bootstrap.servers": f"127.0.0.1:{port}", "group.id": "nobody", "log_level": 0})
    try:
        member.committed(
            [TopicPartition("nothing", 0)], 5
        )  # it serves groups: connections are not yet enough
    except KafkaException:
        return False
    finally:
        member.close()
    return True
