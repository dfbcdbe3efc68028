"""The queue in one process keeps the contract that real brokers keep."""

from collections.abc import Mapping, Sequence

from semel.brokers.dead_letters import headers_of
from semel.testing import broker_contract
from semel.testing.broker_contract import Sent
from semel.testing.queue import Queue, QueueSource


class InProcess:
    ordered = True

    def __init__(self) -> None:
        self.queue = Queue(deadline_s=2.0)

    async def send(self, messages: Sequence[Sent]) -> None:
        for each in messages:
            headers = {"message_id": each.key} if each.key else {}
            self.queue.send(each.body, headers, each.lane)

    def source(self, *, deadline_s: float | None = None) -> QueueSource:
        if deadline_s is not None:
            self.queue.deadline_s = deadline_s
        return self.queue.source()

    async def count_unsettled(self) -> int:
        return len(self.queue)

    async def dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        return [(headers_of(letter), message.body) for message, letter in self.queue.dead]

    async def close(self) -> None:
        pass


class TestQueue(broker_contract.BrokerSuite):
    ordered = True

    async def broker(self) -> InProcess:
        return InProcess()
