"""The runner broken on purpose, one habit at a time: the contract sees each of them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from semel.brokers import runner
from semel.brokers.answers import Answers
from semel.brokers.handling import work_for
from semel.brokers.inbox_handling import InboxHandling
from semel.brokers.outages import SourceLink
from semel.brokers.runner import Runner
from semel.testing import broker_conditions, broker_contract, broker_scene
from tests.brokers.test_queue import InProcess
from tests.brokers.test_queue import TestQueue as InProcessSuite


def ack_before_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Runner._deliver

    async def eager(self: Runner, batch: Any, share: int) -> None:
        for held in batch:
            await self.source.ack([held.arrival])
        await deliver(self, batch, share)

    monkeypatch.setattr(Runner, "_deliver", eager)


def drop_what_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_park", lambda self, held, _delay_s: self._ack(held))


def say_nothing_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_runner: Runner) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Runner, "_beat", silent)


def bury_after_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    words, settle = Runner._before_fail, Runner._settle
    said: list[Any] = []

    async def later(_runner: Runner, *words: Any) -> None:
        said.append(words)

    def settled(self: Runner, held: Any, outcome: Any) -> None:
        if said:
            self._spawn(words(self, *said.pop()))
        settle(self, held, outcome)

    monkeypatch.setattr(Runner, "_before_fail", later)
    monkeypatch.setattr(Runner, "_settle", settled)


def stop_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Runner._drain

    async def abrupt(self: Runner, beating: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await drain(self, beating)

    monkeypatch.setattr(Runner, "_drain", abrupt)


def give_back_without_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    nack = Answers.nack
    monkeypatch.setattr(Answers, "nack", lambda self, arrivals, _delay_s: nack(self, arrivals, 0.0))


def give_back_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(self: Answers, arrivals: Any, delay_s: float) -> None:
        for each in arrivals:
            self._spawn(self._source.nack([each], delay_s))

    monkeypatch.setattr(Answers, "nack", alone)


def run_on_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runner,
        "work_for",
        lambda route, threads, _, on_retry: work_for(route, threads, lambda: False, on_retry),
    )


def trust_what_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_new(_inboxed: InboxHandling, deliveries: Any) -> Any:
        return list(range(len(deliveries))), [], []

    monkeypatch.setattr(InboxHandling, "_sort", all_new)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (ack_before_the_outcome, "nothing_is_acknowledged_before_it_is_recorded"),
    (drop_what_is_busy, "a_busy_message_waits_for_its_owner_and_is_not_dropped"),
    (say_nothing_while_it_runs, "a_handler_longer_than_the_deadline_runs_once"),
    (bury_after_the_failure, "a_dead_letter_is_confirmed_before_the_record_says_failed"),
    (stop_without_waiting, "a_stop_finishes_what_runs_and_leaves_the_rest_to_others"),
    (give_back_without_a_delay, "a_failed_message_comes_back_when_it_is_due_and_not_before"),
    (run_on_after_a_stop, "a_stop_starts_no_further_handler"),
    (run_on_after_a_stop, "a_stop_commits_what_is_done_in_a_transaction"),
    (give_back_one_by_one, "a_stop_starts_no_further_handler"),
    (trust_what_comes_again, "what_was_delivered_before_runs_alone"),
    (trust_what_comes_again, "what_ended_its_workers_is_given_up_and_its_neighbours_are_done"),
]


@pytest.mark.parametrize(("mutant", "scenario"), MUTANTS)
def test_the_contract_sees_it(mutant: Any, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    monkeypatch.setattr(broker_scene, "WITHIN_S", 6.0)
    with pytest.raises((AssertionError, TimeoutError)):
        asyncio.run(broker_contract.arun(scenario, InProcess()))


def test_the_contract_sees_a_stop_that_waits_for_a_silent_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SourceLink, "break_off", lambda _link: None)
    monkeypatch.setattr(broker_conditions, "WITHIN_S", 3.0)
    monkeypatch.setattr(broker_scene, "WITHIN_S", 3.0)
    silent = broker_contract.CONDITIONS["a_stop_is_quick_while_the_broker_is_silent"]
    with pytest.raises((AssertionError, TimeoutError)):
        asyncio.run(silent(InProcessSuite()))
