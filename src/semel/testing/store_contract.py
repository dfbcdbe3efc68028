"""The contract of a store: every protocol rule that a store must keep, as scenarios to run on it.

A scenario is written once and runs in both colours. With pytest, a store's whole test is::

    from semel.testing import ManualClock, store_contract

    class TestMyStore(store_contract.StoreSuite):
        capabilities = MyStore.capabilities

        def connect(self, folder, clock):
            return MyStore(folder / "events", clock=clock)

Without pytest: `for scenario in scenarios(capabilities): run(scenario, harness)`, or `await arun(...)`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from semel.core.protocols import AnyStore, AsyncStore, Capabilities, Store
from semel.testing import ManualClock
from semel.testing.contract import (
    batches,
    claims,
    endless,
    event_time,
    expiry,
    kept_errors,
    marks,
    operators,
    payloads,
    quarantine,
    refresh,
    settles,
)
from semel.testing.contract.harness import SCENARIOS, Need, Scenario, equal
from semel.testing.contract.harness import check as require
from semel.testing.contract.running import Harness, arun, run

__all__ = [
    "PARTS",
    "Colour",
    "Harness",
    "Scenario",
    "ServerSuite",
    "StoreSuite",
    "arun",
    "check",
    "run",
    "scenarios",
]

PARTS = (
    claims,
    settles,
    expiry,
    endless,
    refresh,
    event_time,
    payloads,
    kept_errors,
    quarantine,
    marks,
    batches,
    operators,
)
"""The modules that hold the scenarios; importing them fills the table."""

Colour: TypeAlias = Literal["sync", "async"]


def scenarios(capabilities: Capabilities | None = None, *, manual: bool = True) -> list[Scenario]:
    """Return the scenarios that a store with these capabilities must pass; without capabilities, all scenarios.

    `manual`: the harness has a clock that the test moves.
    """
    met: set[Need] = {"durable", "notifies", "endless", "refreshes"} if capabilities is None else set()
    if capabilities is not None and capabilities.durable:
        met.add("durable")
    if capabilities is not None and capabilities.notifies:
        met.add("notifies")
    if capabilities is not None and capabilities.endless:
        met.add("endless")
    if capabilities is not None and capabilities.refreshes:
        met.add("refreshes")
    if manual:
        met.add("manual")
    return [scenario for scenario in SCENARIOS.values() if scenario.needs <= met]


def check(scenario: Scenario, harness: Harness, colour: Colour = "sync") -> None:
    """Run one scenario in either colour. Raises `AssertionError` if the store breaks its promise."""
    if colour == "sync":
        run(scenario, harness)
    else:
        asyncio.run(arun(scenario, harness))


class _Cases(ABC):
    """The tests that pytest collects from both suites."""

    capabilities: Capabilities
    """The capabilities of the store; they select the scenarios."""
    colours: tuple[Colour, ...] = ("sync", "async")
    """A store for event loops only has `("async",)`."""
    manual: bool
    """Whether the harness has a clock that the test moves."""

    @abstractmethod
    def harness(self, folder: Path) -> Harness:
        """Return a harness with an empty place for the records of one scenario."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize `test_contract` with the scenarios and colours."""
        if "semel_scenario" in metafunc.fixturenames:
            chosen = scenarios(self.capabilities, manual=self.manual)
            metafunc.parametrize("semel_scenario", chosen, ids=_names(chosen))
            metafunc.parametrize("semel_colour", self.colours)

    def test_contract(self, semel_scenario: Scenario, semel_colour: Colour, tmp_path: Path) -> None:
        """The store keeps one promise in one colour."""
        check(semel_scenario, self.harness(tmp_path), semel_colour)

    def test_the_store_promises_what_the_suite_checks(self, tmp_path: Path) -> None:
        """A capability that the suite does not declare would go untested."""
        store = self.harness(tmp_path).connect()
        equal(store.capabilities, self.capabilities, "capabilities of the store, against those of the suite")
        colour = Store if "sync" in self.colours else AsyncStore
        require(isinstance(store, colour), f"{store.name} does not support the colours {self.colours}")


class StoreSuite(_Cases):
    """The contract as a class for pytest to collect: derive from it, name it `Test...`, implement `connect`."""

    manual = True

    @abstractmethod
    def connect(self, folder: Path, clock: ManualClock) -> AnyStore:
        """Return an unopened store in this folder with this clock; the same folder means the same records."""

    def harness(self, folder: Path) -> Harness:
        """Return a harness of the folder and a clock that the test moves."""
        clock = ManualClock()
        return Harness(lambda: self.connect(folder, clock), clock=clock)


class ServerSuite(_Cases):
    """The suite for a store that uses a server's clock: implement `harness`; the scenarios wait for time to pass."""

    manual = False


def _names(chosen: Iterable[Scenario]) -> list[str]:
    return [scenario.name for scenario in chosen]
