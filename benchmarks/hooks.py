"""Hooks: the cost of a client without hooks, and with each hook."""

import logging
from pathlib import Path
from typing import Any

import semel
from benchmarks.memory import COUNT
from semel.cli.bench import workloads
from semel.cli.bench.measure import Measurement, compare
from semel.cli.bench.workloads import nothing
from semel.client.base import raise_if_interrupted
from semel.client.client import Semel
from semel.client.items import ClientTask
from semel.core import flows
from semel.observe.events import HookEvent
from semel.observe.history import HistoryHook
from semel.observe.logging import LogHook
from semel.runtime.generators import drive
from semel.stores import MemoryStore
from semel.types import Done


class Deaf(Semel):
    """A client that never checks for hooks; otherwise the same code."""

    def _execute(self, task: ClientTask, *, reached: bool) -> Any:
        executor = self._own_executor
        flow = task.flow(task) if reached else flows.without_store(task)
        try:
            outcome = drive(flow, executor.__call__)
        except BaseException:
            executor.abandon((task.claim.owner,))
            raise
        executor.drop(task.claim.owner, None)
        if type(outcome) is not Done:
            return raise_if_interrupted(outcome)
        if outcome.reason:
            self._warn_not_kept(task.handler, outcome)
        return outcome


def rows(folder: Path) -> list[Measurement]:
    """`run` in memory, where a call costs least, so that the added cost shows most."""
    from prometheus_client import CollectorRegistry

    from semel.observe.prometheus import PrometheusHook

    logging.getLogger("semel").setLevel(logging.WARNING)
    listeners = {
        "nobody": None,
        "a hook that does nothing": _ignore,
        "LogHook, below the level": LogHook(),
        "PrometheusHook": PrometheusHook(CollectorRegistry()),
        "HistoryHook": HistoryHook(folder / "history"),
    }
    return [_row(name, hook) for name, hook in listeners.items()]


def _ignore(_happening: HookEvent) -> None:
    pass


def _row(name: str, hook: Any) -> Measurement:
    deaf = _client()
    deaf.__class__ = Deaf
    return compare(
        "hooks",
        f"run, {name} listens" if hook is None else f"run, with {name}",
        workloads.running(_client(hook), COUNT),
        "run of a client that never asks",
        workloads.running(deaf, COUNT),
        0.95 if hook is None else None,
    )


def _client(hook: Any = None) -> Semel:
    store = MemoryStore(records_max=10**7)
    made = semel.open(store, consumer="h", hooks=() if hook is None else [hook])
    made.run("warm", nothing)
    return made
