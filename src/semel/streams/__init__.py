"""Deduplicate whole Kafka topics on Kafka itself. Needs the extra `streams`."""

from semel.streams.batches import DedupBatch, RecordOutput
from semel.streams.dedup import Dedup
from semel.streams.progress import DedupCounters, DedupProgress

__all__ = ["Dedup", "DedupBatch", "DedupCounters", "DedupProgress", "RecordOutput"]
