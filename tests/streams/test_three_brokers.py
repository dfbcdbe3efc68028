"""Three real brokers: instances and brokers are killed, disks wiped, members come, go, stall and wake up."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.services import server
from tests.streams.cluster import Cluster
from tests.streams.scene import Stream, end, event, ids_of, kill
from tests.waiting import await_true

ROUNDS = 5
EVENTS = 500
"""Of each fault."""
CUSTOMERS = 20
SETTLE_S = 240.0
PATIENT = "session_s=10&transaction_s=10"
"""Three brokers and up to four instances share this computer: each may get no processor for seconds."""

Delivery = tuple[str, str]
"""A customer, which is the message key, and an id."""


class Storm:
    """Two instances on a cluster, and what was sent."""

    def __init__(self, cluster: Cluster, stream: Stream) -> None:
        self.cluster = cluster
        self.stream = stream
        self.sent: list[Delivery] = []
        self._chance = random.Random(19)
        self.instances = [self.start(number) for number in range(2)]

    def start(self, number: int) -> subprocess.Popen[str]:
        return self.stream.start("--batch", "100", state=f"s{number}")

    def send(self) -> None:
        """New events, and copies of any that were sent before."""
        begun = len(self.sent)
        fresh = [(f"c{self._chance.randrange(CUSTOMERS)}", f"e{begun + n}") for n in range(EVENTS)]
        copies = self._chance.choices([*self.sent, *fresh], k=EVENTS // 2)
        mixed = [*fresh, *copies]
        self._chance.shuffle(mixed)
        for customer, id_ in mixed:
            self.stream.produce(event(id_), customer)
        self.stream.flush()
        self.sent += mixed

    def passed(self) -> list[str]:
        if self.stream.output not in self.stream.admin.list_topics(timeout=30).topics:
            return []
        return self.stream.passed()

    def settle(self) -> None:
        ids = {id_ for _, id_ in self.sent}
        assert await_true(lambda: set(self.passed()) >= ids, SETTLE_S), (
            f"{len(ids - set(self.passed()))} are missing"
        )

    def amid(self, fault: Callable[[], None]) -> None:
        """Send, and let the fault happen when some of it is out and some is not, or soon after."""
        before = len(self.passed())
        self.send()
        assert await_true(lambda: len(self.passed()) > before, SETTLE_S)
        fault()

    # --- faults ---

    def kill_instance(self) -> None:
        kill(self.instances[0])
        self.instances[0] = self.start(0)

    def wipe_disk(self) -> None:
        kill(self.instances[1])
        shutil.rmtree(self.stream.folder / "s1", ignore_errors=True)
        self.instances[1] = self.start(1)

    def kill_broker(self) -> None:
        self.cluster.kill(self._chance.randrange(3) + 1)
        self.send()
        self.settle()
        self.cluster.start_missing()

    def rebalance(self) -> None:
        """Members join and leave, some gently and some not."""
        guests = [self.start(number) for number in (2, 3)]
        self.send()
        kill(guests[0])
        guests[0] = self.start(2)
        self.send()
        end(guests[1])
        kill(guests[0])

    def stall(self) -> None:
        """One is stopped until others have done its work, and then wakes up."""
        self.instances[0].send_signal(signal.SIGSTOP)
        self.send()
        self.settle()
        self.instances[0].send_signal(signal.SIGCONT)
        self.send()

    def close(self) -> None:
        """Kill the instances; what they said is shown if the test fails."""
        for each in self.instances:
            if each.poll() is None:
                each.send_signal(signal.SIGCONT)
                each.kill()
            sys.stderr.write(f"{each.returncode}: {each.communicate()}\n")


if "SEMEL_SOAK" in os.environ:  # the long form only: it takes a minute for each round

    @pytest.mark.slow
    @pytest.mark.service
    @pytest.mark.timeout(0)
    def test_every_id_is_there_once_and_in_order_whatever_is_killed_wiped_moved_or_stalled(
        tmp_path: Path,
    ) -> None:
        with server.folder() as folder, Cluster(folder) as cluster:
            stream = Stream(tmp_path, partitions=4, servers=cluster.servers, copies=3, options=PATIENT)
            storm = Storm(cluster, stream)
            try:
                for _ in range(ROUNDS):
                    for fault in (
                        storm.kill_instance, storm.wipe_disk, storm.kill_broker, storm.rebalance, storm.stall,
                    ):  # fmt: skip
                        storm.amid(fault)
                storm.settle()
                for each in storm.instances:
                    said = end(each)
                    assert each.returncode in (0, -signal.SIGTERM), said  # one of them may still be starting
            finally:
                storm.close()
            records = stream.read()
        assert Counter(ids_of(records)) == Counter({id_ for _, id_ in storm.sent}), "lost or twice"
        assert _by_customer(
            [(record.key().decode(), id_) for record, id_ in zip(records, ids_of(records), strict=True)]
        ) == (_by_customer(list(dict.fromkeys(storm.sent)))), "in the order of the input"


def _by_customer(deliveries: list[Delivery]) -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for customer, id_ in deliveries:
        found[customer].append(id_)
    return found
