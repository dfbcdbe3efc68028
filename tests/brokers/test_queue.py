"""The queue in one process keeps the contract that real brokers keep."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

from semel.brokers.dead_letters import headers_of
from semel.brokers.source import Arrival
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
            assert each.body is not None
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


class Silent(QueueSource):
    """A source whose queue may answer nothing for a while."""

    def __init__(self, broker: "CutOffQueue") -> None:
        super().__init__(broker.queue)
        self._broker = broker

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        await self._broker.answers.wait()
        return await super().receive(limit, wait_s)

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        await self._broker.answers.wait()
        await super().ack(arrivals)

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        await self._broker.answers.wait()
        await super().nack(arrivals, delay_s)

    async def close(self) -> None:
        await self._broker.answers.wait()


class CutOffQueue(InProcess):
    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    def source(self, *, deadline_s: float | None = None) -> QueueSource:
        super().source(deadline_s=deadline_s)
        return Silent(self)

    async def cut_off(self) -> None:
        self.queue.away = True

    async def fall_silent(self) -> None:
        self.answers.clear()

    async def reconnect(self) -> None:
        self.queue.away = False
        self.answers.set()


IN_PROCESS = "the queue is in this process"


class TestQueue(broker_contract.BrokerSuite):
    ordered = True
    not_applicable: ClassVar = {
        "wrong_credentials_end_the_runner": IN_PROCESS,
        "a_missing_place_ends_the_runner": IN_PROCESS,
        "a_member_that_is_replaced_ends_with_the_reason": "consumers have no names",
        "a_missing_place_for_dead_letters_is_made_or_refused_at_the_start": IN_PROCESS,
        "a_place_for_dead_letters_that_is_removed_later_loses_nothing": IN_PROCESS,
        "a_body_near_the_limit_of_the_broker_is_not_lost": "a body may have any size",
        "a_message_without_a_body_is_passed_as_none_or_skipped": "every message has a body",
        "a_probe_with_wrong_credentials_is_refused": IN_PROCESS,
        "a_probe_reads_and_changes_nothing": IN_PROCESS,
        "a_window_shorter_than_the_horizon_is_warned_of": IN_PROCESS,
        "doctor_names_what_explain_names": IN_PROCESS,
    }

    async def broker(self) -> InProcess:
        return InProcess()

    def away(self) -> QueueSource:
        queue = Queue()
        queue.away = True
        return queue.source()

    async def cut_off_broker(self) -> CutOffQueue:
        return CutOffQueue()
