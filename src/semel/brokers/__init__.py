"""Runners: run handlers for the messages of brokers, once for each key.

One loop (`runner`) and one module for each broker; `source` has the protocol of a broker.
"""

from semel.brokers.retry_queue import RunnerCounters, RunnerLimits
from semel.brokers.routes import Middleware, Route
from semel.brokers.runner import Runner
from semel.brokers.source import Arrival, DeadLetterInfo, Source, source_for

__all__ = [
    "Arrival",
    "DeadLetterInfo",
    "Middleware",
    "Route",
    "Runner",
    "RunnerCounters",
    "RunnerLimits",
    "Source",
    "source_for",
]
