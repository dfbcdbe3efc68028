"""The Idempotency-Key middleware for WSGI, under its public name."""

from semel.http.wsgi import WsgiIdempotency as IdempotencyMiddleware
from semel.http.wsgi import by_authorization, path_of

__all__ = ["IdempotencyMiddleware", "by_authorization", "path_of"]
