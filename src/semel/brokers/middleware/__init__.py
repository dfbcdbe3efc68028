"""What can stand around a handler: `Route(charge, once=once, middleware=[tracing(), timeout(5), retry(IOError)])`.

The first stands outermost. Each is given the message and what comes next, and awaits that.
"""

from semel.brokers.middleware.dead_letter import GiveUp, dead_letter
from semel.brokers.middleware.retry import retry
from semel.brokers.middleware.timeout import timeout
from semel.brokers.middleware.tracing import tracing

__all__ = ["GiveUp", "dead_letter", "retry", "timeout", "tracing"]
