"""Run a handler through chaos, and report which promises held."""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic

from semel.core.protocols import Store
from semel.errors import PolicyInvalid
from semel.observe.explain import Explanation, explain
from semel.runtime.process import load_object
from semel.testing.chaos.brokers import chaos_source, refuse_full, topic_for
from semel.testing.chaos.conductor import ChaosProgress, Conductor
from semel.testing.chaos.effects import check_effects, count_effects, create_table, drop_table
from semel.testing.chaos.feeds import BrokerFeed, Feed, QueueFeed
from semel.testing.chaos.plan import FAULT_KINDS
from semel.testing.chaos.report import ChaosReport, build_report
from semel.testing.chaos.settings import ChaosFailed, ChaosSettings
from semel.testing.chaos.stores import (
    StoreFaults,
    directly,
    fault_injector,
    forget_all,
    refuse_used,
    unknown_keys,
)
from semel.testing.worker_processes import Nursery

__all__ = ["run_chaos"]

ENTRY = "semel.testing.chaos.worker:start_worker"
RUN_ID_BYTES = 4


def run_chaos(settings: ChaosSettings, step: Callable[[ChaosProgress], None] = lambda _: None) -> ChaosReport:
    """Run all rounds and judge them. `step` is called many times a second.

    Raises `PolicyInvalid` and other errors of semel for settings that cannot be used, before anything runs, and
    `ChaosFailed` if the run does not come to its end. The records of the run are removed afterwards, and no worker
    is left behind.
    """
    handler = load_object(settings.handler)
    if not callable(handler) or hasattr(handler, "call"):
        raise PolicyInvalid(
            f"{settings.handler} is no plain handler: give the function that semel runs, as to semel consume; of a"
            " guarded function, that is the function itself"
        )
    with ExitStack() as stack:
        store = stack.enter_context(directly(settings.store))
        explanation = _explain(settings, store)
        if not settings.force:
            refuse_used(store, settings.consumer)
        check_effects(settings, store)
        return _run(settings, store, explanation, stack, step)


def _explain(settings: ChaosSettings, store: Store) -> Explanation:
    """Return what the table promises. Raises `PolicyInvalid` for a store that only one process sees."""
    if not store.capabilities.shared:
        raise PolicyInvalid(
            f"{store.name} is seen by one process only; chaos needs a store that workers share"
        )
    return explain(
        store,
        settings.mode,
        window_us=round(settings.window_s * 1e6),
        lease_us=round(settings.lease_s * 1e6),
        sink=settings.sink,
    )


def _run(
    settings: ChaosSettings,
    store: Store,
    explanation: Explanation,
    stack: ExitStack,
    step: Callable[[ChaosProgress], None],
) -> ChaosReport:
    feed: Feed = QueueFeed(settings.visibility_s)
    source = ""
    if settings.source:
        topic = topic_for(settings.source)
        stack.callback(topic.close)
        if not settings.force:
            refuse_full(topic)
            stack.callback(_quietly, topic.remove)
        feed, source = BrokerFeed(topic), chaos_source(settings.source, settings.lease_s)
    if settings.mode == "inbox" and not settings.effects:
        create_table(store)
        stack.callback(_quietly, lambda: drop_table(store))
    folder = Path(tempfile.mkdtemp(prefix="semel-chaos-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    log = folder / "workers.log"
    faults = fault_injector(settings.store, store)
    stack.callback(faults.close)
    nursery = Nursery(ENTRY, log)
    stack.callback(nursery.close)
    conductor = Conductor(
        settings, feed, faults, nursery, log, source=source, run_id=os.urandom(RUN_ID_BYTES).hex(), step=step
    )
    began = monotonic()
    stack.callback(
        lambda: _quietly(lambda: forget_all(store, settings.consumer, list(conductor.ledger.deliveries)))
    )
    try:
        keys = conductor.run()
    except ConnectionError as error:
        raise ChaosFailed(
            f"the workers cannot be started: {error}\n{log.read_text(errors='replace')}"
        ) from error
    faults.restore()
    return build_report(
        settings,
        explanation,
        conductor.ledger,
        keys,
        count_effects(settings, store, keys, conductor.ledger),
        unknown_keys(store, settings.consumer, keys),
        rounds=conductor.progress.rounds,
        seconds=monotonic() - began,
        not_injected=_not_injected(settings, faults, store.name),
    )


def _not_injected(settings: ChaosSettings, faults: StoreFaults, name: str) -> list[str]:
    """Return the faults that were wanted and that this store or source does not allow, in words."""
    wanted = settings.faults or FAULT_KINDS
    found: list[str] = []
    if settings.source and "ack lost" in wanted:
        found.append("lost acknowledgements: a broker's answers are its own")
    if not faults.cuts and not {"store cut off", "reply lost"}.isdisjoint(wanted):
        found.append(f"cutting the store off: nothing can stand in front of {name}")
    elif not faults.replies and "reply lost" in wanted:
        found.append(f"lost replies of the store: {name} is not behind TCP; its lock was held instead")
    return found


def _quietly(clean: Callable[[], None]) -> None:
    """Clean up; a store or broker that does not answer any more keeps what was left."""
    with suppress(Exception):
        clean()
