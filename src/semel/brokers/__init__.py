"""Runners: handlers for what brokers deliver, once for each key.

One loop (`runner`) and one small file for each broker; `source` says what a broker has to offer.
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
