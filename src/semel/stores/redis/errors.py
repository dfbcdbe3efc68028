"""Translate the errors of servers and driver into semel's errors, and decide which calls to retry."""

from typing import Literal, TypeAlias

from redis import exceptions

from semel.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable

__all__ = [
    "BROKEN",
    "Kind",
    "NotSent",
    "ServerError",
    "as_message",
    "connect_error",
    "kind_of",
    "other_node",
    "to_store_error",
]

Kind: TypeAlias = Literal[
    "text", "moved", "ask", "split", "wait", "full", "refused", "unsent", "cut", "other"
]
"""`text`: send the script's text. `moved`, `ask`: another node has the key. `split`: the keys are being moved, send one
call for each key. `wait`: retry later. `unsent`: the call was not sent. `cut`: the connection broke, so it is unknown
whether the call was carried out."""

_BY_WORD: dict[str, Kind] = {
    "NOSCRIPT": "text",
    "MOVED": "moved",
    "ASK": "ask",
    "TRYAGAIN": "split",
    "LOADING": "wait",
    "READONLY": "wait",
    "MASTERDOWN": "wait",
    "CLUSTERDOWN": "wait",
    "BUSY": "wait",
    "UNBLOCKED": "wait",
    "OOM": "full",
    "NOPERM": "refused",
    "NOAUTH": "refused",
    "WRONGPASS": "refused",
}
_ANYWHERE = ("NOSCRIPT", "READONLY", "OOM", "MISCONF", "NOREPLICAS", "LOADING", "MASTERDOWN")
"""Error codes that may stand later in the text: older servers put a prefix before the error of a script's command."""


class NotSent(Exception):
    """There was no connection, so nothing was sent."""


class ServerError(Exception):
    """An error reply of the server, with its unchanged text."""


def kind_of(error: Exception) -> Kind:
    """Return how to react to the error."""
    if isinstance(error, NotSent):
        return "unsent"
    if not isinstance(error, ServerError):
        return "cut"
    text = str(error)
    word = text.split(" ", 1)[0].lstrip("-")
    if word in _BY_WORD:
        return _BY_WORD[word]
    for other in _ANYWHERE:
        if other in text[:200]:
            return _BY_WORD.get(other, "other")
    return "other"


def other_node(error: Exception) -> tuple[str, int] | None:
    """Return the node in a redirection such as `ASK 1234 127.0.0.1:7001`; `None` if it names no host."""
    host, _, port = str(error).split(" ")[2].rpartition(":")
    return (host, int(port)) if host not in ("", "?") else None


def to_store_error(error: Exception, name: str) -> StoreError:
    """Return the `StoreError` to raise or to answer with instead of this error."""
    kind = kind_of(error)
    if kind == "full":
        return StoreFull(
            f"{name} has reached its maxmemory; give it more, or shorten the window. Stored records still answer"
        )
    if kind == "refused":
        return StoreRefused(
            f"{name} refuses this user: {error}; the user needs rights on its keys and scripts"
        )
    if kind == "unsent":
        return StoreUnavailable(f"{name} cannot be reached: {error}")
    if kind == "cut":
        return StoreUnavailable(f"{name} gave no answer: {error}")
    return StoreUnavailable(f"{name} did not carry out the call: {error}")


BROKEN = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
"""Errors after which the connection cannot be used any more."""

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
    """Return the server's error reply, with the error code that the driver turned into a class.

    Returns `None` if the error is not a reply of the server.
    """
    for kind, word in _WORDS:
        if isinstance(error, kind):
            text = str(error)
            return ServerError(text if text.startswith(word) else f"{word} {text}")
    if isinstance(error, exceptions.ResponseError):
        return ServerError(str(error))
    return None


def connect_error(error: Exception) -> Exception:
    """Return the error of a failed connect: the server's reply, or `NotSent`."""
    return as_message(error) or NotSent(str(error) or type(error).__name__)
