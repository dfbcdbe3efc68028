"""Read the driver's errors: which were the server's words, and which are a connection's end."""

from redis import exceptions

from semel.stores.redis.trouble import ServerError, NotSent

__all__ = ["BROKEN", "as_message", "unsent"]

BROKEN = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
"""The connection is of no more use."""

_WORDS: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.NoScriptError, "NOSCRIPT"),
    (exceptions.MovedError, "MOVED"),
    (exceptions.AskError, "ASK"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
    (exceptions.MasterDownError, "MASTERDOWN"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.NoPermissionError, "NOPERM"),
    (exceptions.AuthenticationError, "WRONGPASS"),
    (exceptions.AuthorizationError, "NOPERM"),
)


def as_message(error: Exception) -> ServerError | None:
    """The server's own words again, whose first the driver has turned into a class; `None`: it said nothing."""
    for kind, word in _WORDS:
        if isinstance(error, kind):
            text = str(error)
            return ServerError(text if text.startswith(word) else f"{word} {text}")
    if isinstance(error, exceptions.ResponseError):
        return ServerError(str(error))
    return None


def unsent(error: Exception) -> Exception:
    """What came of trying to connect."""
    return as_message(error) or NotSent(str(error) or type(error).__name__)
