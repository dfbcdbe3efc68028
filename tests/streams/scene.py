"""A topic to deduplicate on the real broker, instances that come and go, and what a reader of the output sees."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.cimpl import NewTopic

from semel.streams import Dedup
from tests.cli.processes import ROOT, environment
from tests.services import kafka as service
from tests.waiting import await_true

PARTITIONS = 3
QUICK = "session_s=4&transaction_s=4"
"""As short as a busy computer allows: a member that gets no processor for that long is expelled."""
STOP_S = 60.0
CREATE_S = 120.0


def event(id_: str, **more: Any) -> bytes:
    return json.dumps({"id": id_, **more}).encode()


class Stream:
    """A fresh topic and the topics that are made of it."""

    def __init__(
        self,
        folder: Path,
        partitions: int = PARTITIONS,
        servers: str = "",
        copies: int = 1,
        options: str = QUICK,
    ) -> None:
        self.folder = folder
        self.partitions = partitions
        self.options = options
        self.address = servers or service.servers()
        self.admin = service.admin() if not servers else _admin(servers)
        self.name = f"d-{os.urandom(6).hex()}"
        self.output = f"{self.name}.out"
        self.marks = f"{self.name}.g.marks"
        self.create(NewTopic(self.name, partitions, copies))
        self._producer = Producer(
            {
                "bootstrap.servers": self.address,
                "enable.idempotence": True,
                "message.max.bytes": 4_000_000,
                "log_level": 0,
            }
        )
        self._instances = 0

    def create(self, *topics: NewTopic) -> None:
        for each in self.admin.create_topics(list(topics)).values():
            each.result(CREATE_S)
        for each in topics:
            assert await_true(lambda name=each.topic: _is_led(self.admin, name), 60)  # type: ignore[misc]

    @property
    def url(self) -> str:
        return f"kafka://{self.address}/{self.name}?group=g&{self.options}"

    def send(self, *ids: str, **more: Any) -> None:
        """Send events whose id is their message key."""
        for id_ in ids:
            self.produce(event(id_, **more), id_)
        self.flush()

    def produce(self, body: bytes | None, key: str | None = None, **more: Any) -> None:
        while True:
            try:
                self._producer.produce(self.name, body, key, **more)
            except BufferError:
                self._producer.poll(0.1)
            else:
                return

    def flush(self) -> None:
        assert self._producer.flush(60) == 0

    # --- instances ---

    def dedup(
        self, kind: type[Dedup] = Dedup, *, options: str = "", state: str = "state", **more: Any
    ) -> Dedup:
        """An instance in this process."""
        more = {"key": "id", "state": self.folder / state, **more}
        return kind(f"{self.url}{options}", self.output, **more)

    def run(self, kind: type[Dedup] = Dedup, **more: Any) -> Dedup:
        """Run an instance until nothing is left."""
        made = self.dedup(kind, **more)
        made.run(until_idle=True)
        return made

    def start(self, *arguments: str, state: str = "") -> subprocess.Popen[str]:
        """Start the real program."""
        self._instances += 1
        folder = self.folder / (state or f"state-{self._instances}")
        command = [
            sys.executable, "-m", "semel", "dedup", "--from", self.url, "--to", self.output, "--key", "id",
            "--state", str(folder), *arguments,
        ]  # fmt: skip
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    @contextmanager
    def running(self, *arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
        process = self.start(*arguments, **more)
        try:
            yield process
        finally:
            kill(process)

    # --- what there is ---

    def read(self, topic: str = "", isolation: str = "read_committed") -> list[Any]:
        """All records of a topic, by partition and in order."""
        topic = topic or self.output
        reader = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "look",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": isolation,
            }
        )
        try:
            number = len(reader.list_topics(topic, 30).topics[topic].partitions)
            reader.assign([TopicPartition(topic, each, 0) for each in range(number)])
            found: list[Any] = []
            ended: set[int] = set()
            while len(ended) < number:
                for record in reader.consume(1000, 0.2):
                    if record.error() is None:
                        found.append(record)
                    else:
                        ended.add(record.partition() or 0)
            return sorted(found, key=lambda record: (record.partition(), record.offset()))
        finally:
            reader.close()

    def passed(self, isolation: str = "read_committed") -> list[str]:
        """The ids in the output."""
        return ids_of(self.read(isolation=isolation))

    def close(self) -> None:
        names = [name for name in self.admin.list_topics(timeout=30).topics if name.startswith(self.name)]
        for each in self.admin.delete_topics(names).values():
            each.result(30)


def ids_of(records: Sequence[Any]) -> list[str]:
    return [json.loads(record.value())["id"] for record in records]


def kill(process: subprocess.Popen[str]) -> None:
    """As the kernel would."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.communicate()


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> str:
    """End it gently; what it says."""
    if process.poll() is None:
        process.send_signal(number)
    said, told = process.communicate(timeout=STOP_S)
    return said + told


def _is_led(admin: Any, topic: str) -> bool:
    known = admin.list_topics(timeout=30).topics
    return topic in known and all(each.leader >= 0 for each in known[topic].partitions.values())


def _admin(servers: str) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": servers, "log_level": 0})
