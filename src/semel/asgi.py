"""The Idempotency-Key middleware for ASGI, under its public name."""

from semel.http.asgi import AsgiIdempotency as IdempotencyMiddleware
from semel.http.asgi import by_authorization, path_of

__all__ = ["IdempotencyMiddleware", "by_authorization", "path_of"]
