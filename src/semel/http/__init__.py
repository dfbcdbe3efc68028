"""The `Idempotency-Key` header: middleware for ASGI, WSGI and FastAPI."""

from semel.http.presets import PRESETS, Preset
from semel.http.rules import Rules, digest_of_credentials

__all__ = ["PRESETS", "Preset", "Rules", "digest_of_credentials"]
