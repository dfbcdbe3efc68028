"""The `Idempotency-Key` header: middleware for ASGI, WSGI and FastAPI."""

from semel.http.rules import PRESETS, Preset, Rules, digest_of_credentials

__all__ = ["PRESETS", "Preset", "Rules", "digest_of_credentials"]
