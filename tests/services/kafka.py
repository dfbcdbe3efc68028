"""Kafka for tests: a real broker in KRaft mode, one process for the whole run; from `SEMEL_TEST_KAFKA`, or by Maven."""

import os
import signal
import subprocess
from pathlib import Path

from tests.services import java, server
from tests.services.server import Missing, State

ADDRESS_NAME = "SEMEL_TEST_KAFKA"
_ID = "MkU3OEVBNTcwNTJENDM2Qg"
_QUIET = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]


def address() -> str:
    """Host and port of the broker."""
    found: str = server.shared("kafka", _start)["address"]
    return found


class Own:
    """A broker of one test's own, to be killed and restarted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, controller = server.free_port(), server.free_port()
        _format(folder, self._port, controller)
        self.state: State = {}
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        self.state = _run(self._folder, self._port)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        for pid in self.state.get("pids", ()):
            server.end(pid, how)
        self.state = {}


def _start(folder: Path) -> State:
    given = os.environ.get(ADDRESS_NAME)
    if given:
        return {"address": given}
    port, controller = server.free_port(), server.free_port()
    _format(folder, port, controller)
    return _run(folder, port)


def _format(folder: Path, port: int, controller: int) -> None:
    settings = {
        "node.id": "1",
        "process.roles": "broker,controller",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(folder / "data"),
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        "log.segment.bytes": "16777216",
        "log.cleaner.dedupe.buffer.size": "16777216",
    }
    file = folder / "server.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="ascii")
    ended = subprocess.run(
        java.command(
            "kafka", "kafka.tools.StorageTool", "format", "-t", _ID, "-c", str(file), options=_QUIET
        ),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if ended.returncode != 0:
        raise Missing(f"the broker's folder could not be made: {(ended.stdout + ended.stderr)[-500:]}")


def _run(folder: Path, port: int) -> State:
    log = folder / "kafka.log"
    pid = server.spawn(
        java.command("kafka", "kafka.Kafka", str(folder / "server.properties"), options=_QUIET), log
    )
    server.await_ready(lambda: _answers(port), "kafka", log)
    return {"address": f"127.0.0.1:{port}", "pids": [pid]}


def _answers(port: int) -> bool:
    """Whether the broker serves groups: a port that listens is not yet enough."""
    from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
    try:
        if not admin.list_topics(timeout=2).brokers:
            return False
        for asked in admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("nobody")]).values():
            asked.result(2)
    except (KafkaException, TimeoutError):
        return False
    return True
