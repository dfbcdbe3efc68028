"""The stores that a service is tested on."""

from pathlib import Path

from tests.services import postgres, redis

KINDS = ("sqlite", "redis", "postgres")


def store_url(kind: str, folder: Path) -> str:
    """A store of that kind which nobody else uses."""
    match kind:
        case "sqlite":
            return f"sqlite:///{folder}/semel.db"
        case "redis":
            return redis.place(folder)
        case _:
            return postgres.place(folder)
