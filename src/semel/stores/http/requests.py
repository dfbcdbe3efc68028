"""What the http store says and hears, the same in both colours: parts of a batch, and what a reply means."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

import httpx2
import msgspec
from msgspec import Struct

from semel.core.commands import Admit, Answer, Claim, Count, Item, Lookup, ReadSettings, Renew, Scan, Settle
from semel.core.protocols import Capabilities, Listener
from semel.errors import PolicyInvalid, StoreClosed, StoreError, StoreRefused, StoreUnavailable
from semel.runtime.urls import struct_options
from semel.stores.http import encoding
from semel.types import Completed, Forgotten, Unavailable

__all__ = ["About", "HttpOptions", "HttpRequests", "HttpTarget", "RequestPart", "parse"]

if TYPE_CHECKING:
    import ssl


WAIT_MAX_S = 3600.0
TOKEN_CHARS_MAX = 4096


class HttpOptions(Struct, frozen=True, kw_only=True):
    """All that may be said of a server beside where it is."""

    token: str = ""
    """What the server knows us by; better in a file than in a URL."""
    token_file: str = ""
    """A file that holds the token, read when the store is made."""
    connect_s: float = 5.0
    answer_s: float = 10.0
    """How long to wait for a connection, and for an answer."""
    ca_file: str = ""
    """The authority that signed the server's certificate, where it is your own."""

    def __post_init__(self) -> None:
        for name in ("connect_s", "answer_s"):
            if not 0 < getattr(self, name) <= WAIT_MAX_S:
                raise PolicyInvalid(
                    f"{name} is {getattr(self, name)}; it must lie between 0 and {WAIT_MAX_S:g}"
                )
        if self.token and self.token_file:
            raise PolicyInvalid("give token or token_file, not both")
        if not self.token.isascii() or not self.token.isprintable() or len(self.token) > TOKEN_CHARS_MAX:
            raise PolicyInvalid("the token is not what `semel token create` prints")


class HttpTarget(Struct, frozen=True):
    """Where the server is, and how to speak to it."""

    base: str
    """Scheme, host, port and path, without a slash at its end: also the store's name."""
    token: str
    options: HttpOptions

    def __repr__(self) -> str:
        return f"Place({self.base!r})"

    def trust(self) -> "ssl.SSLContext | bool":
        """Whose certificates are believed. Without TLS nobody's: to load them takes a third of a second."""
        if not self.base.startswith("https:"):
            return False
        if not self.options.ca_file:
            return True
        import ssl

        return ssl.create_default_context(cafile=self.options.ca_file)


def parse(url: str, given: dict[str, Any]) -> HttpTarget:
    """The place that a URL and options by name describe. Raises `PolicyInvalid`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
        raise PolicyInvalid(f"{_shorten(parts)!r} is no server's URL; write https://host:port")
    if parts.username:
        raise PolicyInvalid("a server's URL has no user; write the token as a password: https://:TOKEN@host")
    if parts.password:
        given = {"token": unquote(parts.password)} | given
    options = struct_options(url, HttpOptions, given)
    return HttpTarget(_shorten(parts), options.token or _read(options.token_file), options)


def _shorten(parts: SplitResult) -> str:
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


def _read(file: str) -> str:
    if not file:
        return ""
    try:
        with Path(file).open(encoding="ascii") as opened:
            return opened.read(TOKEN_CHARS_MAX).strip()
    except (OSError, UnicodeError) as error:
        raise PolicyInvalid(f"token_file {file} cannot be read: {error}") from error


ITEMS_PATH = "/v1/items"
ABOUT_PATH = "/v1/store"
CONNECTIONS_MAX = 32
IDLE_S = 30.0
"""How long an unused connection is kept: less than the server keeps it, so that it is rarely found closed."""
ARRAY_BYTES = 5
PROBLEM_CHARS_MAX = 500
OK = 200
_LATER = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Statuses that say nothing about the request itself: it may be sent again."""

REPEATABLE = (Claim, Renew, Settle, Lookup, Scan, Count, ReadSettings, Admit)
"""What may be said again after a lost reply: looks, and what its owner and fence tell apart."""

DROPPED = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)
"""The connection ended under the request, as an idle one does when the server was restarted."""
FAILED = (httpx2.HTTPError, httpx2.StreamError, OSError)
"""Whatever keeps a request from being answered."""


class About(msgspec.Struct, frozen=True):
    """What the server says of itself when the store is opened."""

    store: str
    durable: bool
    exact: bool
    fenced: bool
    shared: bool
    batch_items_max: int
    body_bytes_max: int


class RequestPart(msgspec.Struct, frozen=True):
    """One request: the items from `start` on."""

    items: Sequence[Item]
    body: bytes

    @property
    def repeatable(self) -> bool:
        """Whether all of it may be said twice."""
        return all(isinstance(item, REPEATABLE) for item in self.items)


class HttpRequests:
    """The place, what is known of the server, and who listens. Thread-safe."""

    def __init__(self, url: str, given: dict[str, Any]) -> None:
        self.place: HttpTarget = parse(url, given)
        self.name: str = self.place.base
        self.about: About | None = None
        self.closed: bool = False
        self._listeners: tuple[Listener, ...] = ()
        self.after_fork()

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = Lock()

    @property
    def capabilities(self) -> Capabilities:
        """As the server said when the store was opened; until then, what is hoped for."""
        about = self.about
        if about is None:
            return Capabilities(durable=True, shared=True, notifies=True, audits=True)
        return Capabilities(
            durable=about.durable,
            exact=about.exact,
            fenced=about.fenced,
            shared=True,  # others reach the server as we do, whatever is behind it
            notifies=True,
            audits=True,
        )

    def client_options(self) -> dict[str, Any]:
        """How the driver is set up, in either colour. Its own retries are off: they would repeat marks."""
        said = self.place.options
        headers = {"user-agent": "semel", "accept-encoding": "identity"}
        if self.place.token:
            headers["authorization"] = f"Bearer {self.place.token}"
        return {
            "base_url": self.place.base,
            "headers": headers,
            "verify": self.place.trust(),
            "timeout": httpx2.Timeout(said.answer_s, connect=said.connect_s, pool=said.answer_s),
            "limits": httpx2.Limits(max_connections=CONNECTIONS_MAX, keepalive_expiry=IDLE_S),
            "follow_redirects": False,  # the token is for this server alone
            "trust_env": False,
        }

    # --- opening ---

    def note_server(self, response: httpx2.Response) -> None:
        """Store the server's description of itself. Raises `StoreRefused` or `StoreUnavailable`."""
        if response.status_code != OK:
            raise self._problem(response)
        try:
            self.about = msgspec.json.decode(response.content, type=About)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreRefused(f"{self.name} is no semel server, or another version of it: {error}") from None

    # --- sending ---

    def parts(self, items: Sequence[Item]) -> Iterator[RequestPart]:
        """The items in as few requests as the server's limits allow."""
        assert self.about is not None
        room = self.about.body_bytes_max - ARRAY_BYTES
        start, size, pieces = 0, 0, list[bytes]()
        for at, item in enumerate(items):
            piece = encoding.encode_item(item)
            if pieces and (size + len(piece) > room or len(pieces) == self.about.batch_items_max):
                yield RequestPart(items[start:at], encoding.batch_of(pieces))
                start, size, pieces = at, 0, []
            pieces.append(piece)
            size += len(piece)
        if pieces:
            yield RequestPart(items[start:], encoding.batch_of(pieces))

    def answers(self, part: RequestPart, response: httpx2.Response) -> list[Answer]:
        """The answers in a reply; what the server cannot do now is `Unavailable`, what it will not do raises."""
        if response.status_code == OK:
            found = encoding.answers_from(response.content)
            if len(found) != len(part.items):
                raise StoreError(f"{self.name} gave {len(found)} answers to {len(part.items)} items")
            return found
        problem = self._problem(response)
        if isinstance(problem, StoreUnavailable) or len(part.items) == 1:
            return [Unavailable(problem)] * len(part.items)
        raise problem

    def rest_of(self, part: RequestPart, answers: Sequence[Answer]) -> RequestPart | None:
        """The items that found no room in the response, to be sent again; `None`: there are none."""
        for at, answer in enumerate(answers):
            if at and isinstance(answer, Unavailable) and isinstance(answer.error, encoding.AnswerFull):
                rest = part.items[at:]
                return RequestPart(rest, encoding.batch_of([encoding.encode_item(item) for item in rest]))
        return None

    def unavailable_answers(self, part: RequestPart, error: Exception) -> list[Answer]:
        """Return `Unavailable` for each item of a request without a reply: the server may have executed them."""
        if self.closed:
            raise self.closed_error() from error
        answer = Unavailable(StoreUnavailable(f"{self.name} gave no answer: {type(error).__name__}: {error}"))
        return [answer] * len(part.items)

    def unreachable(self, error: Exception) -> StoreUnavailable:
        """The error for a server that cannot be asked what it is."""
        return StoreUnavailable(f"{self.name} cannot be reached: {type(error).__name__}: {error}")

    def closed_error(self) -> StoreClosed:
        """The error for using it after `close`."""
        return StoreClosed(f"{self.name} is closed; open it again")

    def _problem(self, response: httpx2.Response) -> StoreError:
        status = response.status_code
        said = _detail_of(response)
        text = f"{self.name} answered {status}: {said}" if said else f"{self.name} answered {status}"
        return StoreUnavailable(text) if status in _LATER else StoreRefused(text)

    # --- listening ---

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Remember a listener; returns what forgets it."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def stop() -> None:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return stop

    def notify(self, items: Sequence[Item], answers: Sequence[Answer]) -> None:
        """Notify the listeners of records that this object has ended."""
        for listener in self._listeners:
            for item, answer in zip(items, answers, strict=True):
                if (type(answer) is Completed and not answer.already) or type(answer) is Forgotten:
                    listener(item.id)  # type: ignore[union-attr]  # only items on a record are answered so


def _detail_of(response: httpx2.Response) -> str:
    """What a problem's JSON says, or nothing."""
    try:
        document = msgspec.json.decode(response.content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    detail = document.get("detail") if isinstance(document, dict) else None
    return detail[:PROBLEM_CHARS_MAX] if isinstance(detail, str) else ""
