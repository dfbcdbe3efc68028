"""The Idempotency-Key header: what the middlewares for ASGI and WSGI have in common."""

from semel.http.keys import digest_of_credentials
from semel.http.presets import PRESETS, Preset
from semel.http.rules import Rules

__all__ = ["PRESETS", "Preset", "Rules", "digest_of_credentials"]
