"""A Django app: settings, an Idempotency-Key middleware, inbox and outbox on `atomic`, a list in the admin, checks.

::

    INSTALLED_APPS = [..., "semel.integrations.django"]
    MIDDLEWARE = [..., "semel.integrations.django.middleware.IdempotencyMiddleware"]
    SEMEL = {"CONSUMER": "shop"}  # the records are in the database "default"
"""

from semel.integrations.django.client import client, close, first, publish

__all__ = ["client", "close", "first", "publish"]
