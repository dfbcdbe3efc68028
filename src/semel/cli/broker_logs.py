"""Keep the log of broker clients off the terminal: each outage is reported once, by the runner."""

import logging

__all__ = ["quiet_clients"]

CLIENTS = ("aiormq", "aio_pika", "nats", "botocore", "aiobotocore")
"""They log each failed attempt as an error, with tracebacks."""


def quiet_clients() -> None:
    """Log nothing of the clients' own but in `--log-level debug`."""
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        for name in CLIENTS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
