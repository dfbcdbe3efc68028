"""Chaos for your own handler: duplicates, kills, pauses and outages in real worker processes, and a verdict."""

from semel.testing.chaos.report import ChaosReport, document, summary
from semel.testing.chaos.run import run_chaos
from semel.testing.chaos.settings import ChaosFailed, ChaosSettings

__all__ = ["ChaosFailed", "ChaosReport", "ChaosSettings", "document", "run_chaos", "summary"]
