"""The Idempotency-Key dependency for FastAPI, under its public name."""

from semel.http.fastapi import Idempotent, IdempotentRoute

__all__ = ["Idempotent", "IdempotentRoute"]
