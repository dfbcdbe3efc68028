"""Three brokers on this computer, for tests that kill one of them."""

import contextlib
import os
import signal
import subprocess
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.services import java, server
from tests.services.nats import answers
from tests.waiting import await_true

HEAP_MB = 384
READY_S = 180.0


class Cluster:
    """Three nodes, each broker and controller, each topic on all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = java.command("kafka", HEAP_MB)
        self._ports = {node: server.free_port() for node in (1, 2, 3)}
        self._controllers = {node: server.free_port() for node in (1, 2, 3)}
        self._pids: dict[int, int] = {}

    @property
    def servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports.values())

    def __enter__(self) -> Self:
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "_")
        for node in self._ports:
            settings = self._settings(node)
            subprocess.run(
                [*self._run, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)],
                capture_output=True, check=True, timeout=READY_S,
            )  # fmt: skip
        self.start_missing()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in list(self._pids):
            self.kill(node)

    def _settings(self, node: int) -> Path:
        voters = ",".join(f"{each}@127.0.0.1:{port}" for each, port in self._controllers.items())
        file = self._folder / f"node-{node}.properties"
        file.write_text(
            "\n".join(
                (
                    "process.roles=broker,controller",
                    f"node.id={node}",
                    f"controller.quorum.voters={voters}",
                    f"listeners=PLAINTEXT://127.0.0.1:{self._ports[node]},CONTROLLER://127.0.0.1:{self._controllers[node]}",
                    "controller.listener.names=CONTROLLER",
                    "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
                    f"log.dirs={self._folder / f'data-{node}'}",
                    "auto.create.topics.enable=false",
                    "default.replication.factor=3",
                    "min.insync.replicas=2",
                    "offsets.topic.replication.factor=3",
                    "offsets.topic.num.partitions=4",
                    "transaction.state.log.replication.factor=3",
                    "transaction.state.log.min.isr=2",
                    "transaction.state.log.num.partitions=4",
                    "group.min.session.timeout.ms=1000",
                    "transaction.abort.timed.out.transaction.cleanup.interval.ms=500",
                )
            )
        )
        return file

    def kill(self, node: int) -> None:
        """As a power cut would, but for the disk."""
        pid = self._pids.pop(node, None)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            server.end(pid, signal.SIGKILL)

    def start_missing(self) -> None:
        """Start the nodes that do not run, and wait until they listen."""
        for node in self._ports:
            if node not in self._pids:
                command = [*self._run, "kafka.Kafka", str(self._folder / f"node-{node}.properties")]
                self._pids[node] = server.spawn(command, self._folder / f"log-{node}")
        assert await_true(lambda: all(answers(port) for port in self._ports.values()), READY_S)
