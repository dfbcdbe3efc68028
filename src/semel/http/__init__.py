"""The Idempotency-Key header: what the middlewares for ASGI and WSGI have in common."""

from semel.http.rules import PRESETS, Preset, Rules, digest_of_credentials

__all__ = ["PRESETS", "Preset", "Rules", "digest_of_credentials"]
