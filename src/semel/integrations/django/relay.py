"""The setting `SINK`: a commit with messages starts a relay in this process, which publishes them."""

import atexit
import logging
import os
from threading import Lock, Thread

from semel.outbox.relay import Relay

__all__ = ["start_relay", "stop_relay"]

STOP_S = 5.0
"""How long the end of the process waits for a broker's answers; unconfirmed messages stay in the outbox."""

_log = logging.getLogger("semel")
_lock = Lock()
_running: dict[int, tuple[Relay, Thread]] = {}
"""The relay of this process by its id: a forked process has no thread, and starts its own."""


def start_relay(source: str, sink: str) -> None:
    """Start the relay of this process, unless it runs. It ends with the process."""
    with _lock:
        found = _running.get(os.getpid())
        if found is not None and found[1].is_alive():
            return
        relay = Relay(source, sink)
        thread = Thread(target=_publish, args=(relay,), name="semel-relay", daemon=True)
        _running.clear()
        _running[os.getpid()] = relay, thread
        thread.start()
    atexit.unregister(stop_relay)
    atexit.register(stop_relay)


def stop_relay() -> None:
    """Stop the relay of this process, if there is one. Messages that are not published stay in the outbox."""
    with _lock:
        found = _running.pop(os.getpid(), None)
    if found is not None:
        relay, thread = found
        relay.stop()
        thread.join(STOP_S)


def _publish(relay: Relay) -> None:
    try:
        relay.run()
    except Exception:  # noqa: BLE001 - the request has been answered: only the log can say it
        _log.exception(
            "the relay of this process has ended; messages stay in the outbox until the next commit or semel relay"
        )
