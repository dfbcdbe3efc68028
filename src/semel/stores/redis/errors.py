"""Say in semel's words what a server's errors mean, and which of them are worth another try."""

from typing import Literal, TypeAlias

from redis import exceptions

from semel.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable

__all__ = ["BROKEN", "Kind", "NotSent", "as_message", "kind_of", "other_node", "to_store_error", "unsent"]

Kind: TypeAlias = Literal[
    "text", "moved", "ask", "split", "wait", "full", "refused", "unsent", "cut", "other"
]
"""`text`: send the script itself. `moved`, `ask`: another node has it. `split`: its keys are being moved, ask for
each alone. `wait`: not now. `unsent`: it never left. `cut`: nobody knows whether it was carried out."""

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
"""Older servers put their own words before those of a script's failing command."""


class NotSent(Exception):
    """No connection could be had, so nothing was sent."""


class ServerError(Exception):
    """An error that the server answered with; its text as it came."""


def kind_of(error: Exception) -> Kind:
    """What to do about it."""
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
    """The node that a redirection names: `ASK 1234 127.0.0.1:7001`; `None`: it does not say which host."""
    host, _, port = str(error).split(" ")[2].rpartition(":")
    return (host, int(port)) if host not in ("", "?") else None


def to_store_error(error: Exception, name: str) -> StoreError:
    """The error to raise or to answer with instead."""
    kind = kind_of(error)
    if kind == "full":
        return StoreFull(
            f"{name} has reached its maxmemory; give it more, or shorten the window. What is stored still answers"
        )
    if kind == "refused":
        return StoreRefused(
            f"{name} does not let this user in: {error}; it needs rights on its keys and scripts"
        )
    if kind == "unsent":
        return StoreUnavailable(f"{name} cannot be reached: {error}")
    if kind == "cut":
        return StoreUnavailable(f"{name} gave no answer: {error}")
    return StoreUnavailable(f"{name} did not carry it out: {error}")


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
