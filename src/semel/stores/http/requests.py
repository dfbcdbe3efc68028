"""Requests of the http store, for sync and async: settings, clients, the parts of a batch, how to read a reply."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote

import httpx2
import msgspec
from msgspec import Struct

from semel.core.commands import Admit, Answer, Claim, Count, Item, Lookup, ReadSettings, Renew, Scan, Settle
from semel.core.protocols import Capabilities, Listener
from semel.errors import PolicyInvalid, StoreClosed, StoreError, StoreMoved, StoreRefused, StoreUnavailable
from semel.runtime.urls import parse_url, struct_options
from semel.stores.http import encoding
from semel.types import Completed, Forgotten, Unavailable

if TYPE_CHECKING:
    import ssl

__all__ = [
    "AsyncHttpClients",
    "HttpClients",
    "HttpOptions",
    "HttpRequests",
    "HttpTarget",
    "RequestPart",
    "ServerDescription",
    "parse",
]

WAIT_MAX_S = 3600.0
TOKEN_CHARS_MAX = 4096


class HttpOptions(Struct, frozen=True, kw_only=True):
    """Options of the store, without the server's address."""

    token: str = ""
    """The token for the server; better in a file than in a URL."""
    token_file: str = ""
    """A file with the token, read when the store object is created."""
    connect_s: float = 5.0
    answer_s: float = 10.0
    """How long to wait for a connection, and for an answer."""
    ca_file: str = ""
    """The certificate authority of the server, if it is your own."""

    def __post_init__(self) -> None:
        for name in ("connect_s", "answer_s"):
            if not 0 < getattr(self, name) <= WAIT_MAX_S:
                raise PolicyInvalid(
                    f"{name} is {getattr(self, name)}; it must lie between 0 and {WAIT_MAX_S:g}"
                )
        if self.token and self.token_file:
            raise PolicyInvalid("give token or token_file, not both")
        if not self.token.isascii() or not self.token.isprintable() or len(self.token) > TOKEN_CHARS_MAX:
            raise PolicyInvalid("the token is not valid; use the one that `semel token create` prints")


class HttpTarget(Struct, frozen=True):
    """The server's address, the token and the options."""

    base: str
    """Scheme, host, port and path, without a slash at the end; also the store's name."""
    token: str
    options: HttpOptions

    def __repr__(self) -> str:
        return f"HttpTarget({self.base!r})"

    def trust(self) -> "ssl.SSLContext | bool":
        """Return the TLS setting for the driver. Without TLS it is off: loading certificates takes 0.3 seconds."""
        if not self.base.startswith("https:"):
            return False
        if not self.options.ca_file:
            return True
        import ssl

        return ssl.create_default_context(cafile=self.options.ca_file)


def parse(url: str, given: dict[str, Any]) -> HttpTarget:
    """Parse the URL and the options. Raises `PolicyInvalid`."""
    parts = parse_url(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
        raise PolicyInvalid(f"{_shorten(parts)!r} is not a server's URL; write https://host:port")
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
"""How long an idle connection is kept: shorter than in the server, so that the server rarely closes it first."""
ARRAY_BYTES = 5
PROBLEM_CHARS_MAX = 500
OK = 200
_LATER = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Statuses that are not about the request itself: it may be sent again."""

REPEATABLE = (Claim, Renew, Settle, Lookup, Scan, Count, ReadSettings, Admit)
"""Items that may be sent again after a lost reply: reads, and items that their owner and fence identify."""

DROPPED = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)
"""The connection broke during the request, as an idle one does after the server was restarted."""
FAILED = (httpx2.HTTPError, httpx2.StreamError, OSError)
"""All errors of a request without a response."""


class ServerDescription(msgspec.Struct, frozen=True):
    """The server's description of itself, read when the store is opened."""

    store: str
    durable: bool
    exact: bool
    fenced: bool
    shared: bool
    batch_items_max: int
    body_bytes_max: int
    endless: bool = False
    refreshes: bool = False


class RequestPart(msgspec.Struct, frozen=True):
    """One request: some items of a batch, and the encoded body."""

    items: Sequence[Item]
    body: bytes

    @property
    def repeatable(self) -> bool:
        """Whether all its items may be sent twice."""
        return all(isinstance(item, REPEATABLE) for item in self.items)


class HttpRequests:
    """The target, the server's description, and the listeners of a store. Thread-safe."""

    def __init__(self, url: str, given: dict[str, Any]) -> None:
        self.place: HttpTarget = parse(url, given)
        self.name: str = self.place.base
        self.about: ServerDescription | None = None
        self.closed: bool = False
        self._listeners: tuple[Listener, ...] = ()
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the lock: another thread of the parent may have held it."""
        self._lock = Lock()

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that the server reported at `open`; until then they are assumed."""
        about = self.about
        if about is None:
            return Capabilities(
                durable=True, shared=True, notifies=True, audits=True, endless=True, refreshes=True
            )
        return Capabilities(
            durable=about.durable,
            exact=about.exact,
            fenced=about.fenced,
            shared=True,  # other clients can reach the server too, whichever store is behind it
            notifies=True,
            audits=True,
            endless=about.endless,
            refreshes=about.refreshes,
        )

    def client_options(self) -> dict[str, Any]:
        """Return the driver's options, sync or async. Its own retries are off: they would repeat marks."""
        options = self.place.options
        headers = {"user-agent": "semel", "accept-encoding": "identity"}
        if self.place.token:
            headers["authorization"] = f"Bearer {self.place.token}"
        return {
            "base_url": self.place.base,
            "headers": headers,
            "verify": self.place.trust(),
            "timeout": httpx2.Timeout(options.answer_s, connect=options.connect_s, pool=options.answer_s),
            "limits": httpx2.Limits(max_connections=CONNECTIONS_MAX, keepalive_expiry=IDLE_S),
            "follow_redirects": False,  # the token is for this server alone
            "trust_env": False,
        }

    # --- opening ---

    def read_about(self, response: httpx2.Response) -> None:
        """Store the server's description of itself. Raises `StoreRefused` or `StoreUnavailable`."""
        if response.status_code != OK:
            raise self._problem(response)
        try:
            self.about = msgspec.json.decode(response.content, type=ServerDescription)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreRefused(
                f"{self.name} is not a semel server, or has another version: {error}"
            ) from None

    # --- sending ---

    def parts(self, items: Sequence[Item]) -> Iterator[RequestPart]:
        """Yield the items in as few requests as the server's limits allow."""
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
        """Return the answers in a response. A server that cannot answer now gives `Unavailable`; a refusal raises."""
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
        """Return the items that did not fit into the response, to send again; `None` if all did."""
        for at, answer in enumerate(answers):
            if at and isinstance(answer, Unavailable) and isinstance(answer.error, encoding.AnswerFull):
                rest = part.items[at:]
                return RequestPart(rest, encoding.batch_of([encoding.encode_item(item) for item in rest]))
        return None

    def unavailable_answers(self, part: RequestPart, error: Exception) -> list[Answer]:
        """Return `Unavailable` for all items: without a response it is unknown whether they were carried out."""
        if self.closed:
            raise self.closed_error() from error
        answer = Unavailable(StoreUnavailable(f"{self.name} gave no answer: {type(error).__name__}: {error}"))
        return [answer] * len(part.items)

    def unreachable(self, error: Exception) -> StoreUnavailable:
        """Error for a server that cannot be reached at `open`."""
        return StoreUnavailable(f"{self.name} cannot be reached: {type(error).__name__}: {error}")

    def closed_error(self) -> StoreClosed:
        """Error for calls made after `close()`."""
        return StoreClosed(f"{self.name} is closed; open it again")

    def _problem(self, response: httpx2.Response) -> StoreError:
        status = response.status_code
        kind, detail = (_read_problem(response, name) for name in ("type", "detail"))
        text = f"{self.name} answered {status}: {detail}" if detail else f"{self.name} answered {status}"
        if kind.endswith(f":{encoding.STORE_MOVED}"):
            return StoreMoved(text)
        return StoreUnavailable(text) if status in _LATER else StoreRefused(text)

    # --- listening ---

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Add a listener; returns a function that removes it."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def stop() -> None:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return stop

    def notify_listeners(self, items: Sequence[Item], answers: Sequence[Answer]) -> None:
        """Notify the listeners of the records that these items ended."""
        for listener in self._listeners:
            for item, answer in zip(items, answers, strict=True):
                if (type(answer) is Completed and not answer.already) or type(answer) is Forgotten:
                    listener(item.id)  # type: ignore[union-attr]  # only items on a record are answered so


def _read_problem(response: httpx2.Response, name: str) -> str:
    """Return a text of a problem in JSON; empty if there is none."""
    try:
        document = msgspec.json.decode(response.content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    found = document.get(name) if isinstance(document, dict) else None
    return found[:PROBLEM_CHARS_MAX] if isinstance(found, str) else ""


class HttpClients:
    """One client for all threads, created at first use."""

    def __init__(self, talk: HttpRequests) -> None:
        self._talk = talk
        self._lock = Lock()
        self._client: httpx2.Client | None = None

    def get(self) -> httpx2.Client:
        """Return the client. Raises `StoreClosed` after the store was closed."""
        with self._lock:
            if self._talk.closed:
                raise self._talk.closed_error()
            if self._client is None:
                self._client = httpx2.Client(**self._talk.client_options())
            return self._client

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


class AsyncHttpClients:
    """A client for each event loop: a program may run one loop after the other."""

    def __init__(self, talk: HttpRequests) -> None:
        self._talk = talk
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    def get(self) -> httpx2.AsyncClient:
        """Return the client of the running loop. Raises `StoreClosed` after the store was closed."""
        if self._talk.closed:
            raise self._talk.closed_error()
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            self._clients = {each: its for each, its in self._clients.items() if not each.is_closed()}
            client = self._clients[loop] = httpx2.AsyncClient(**self._talk.client_options())
        return client

    async def aclose(self) -> None:
        """Close the connections of the running loop, and forget those of other loops."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        self._clients.clear()
        if client is not None:
            with suppress(*FAILED):
                await client.aclose()
