"""The sync and the async client: what they share, and what each of them waits for."""

from semel.client.cleaner import PurgeResult
from semel.client.items import ObserveCounts

__all__ = ["ObserveCounts", "PurgeResult"]
