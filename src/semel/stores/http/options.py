"""How to reach a server, read from a URL: `https://semel.example:8787`, `http://:TOKEN@localhost:8787?answer_s=5`."""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from msgspec import Struct
from msgspec.structs import fields

from semel.errors import PolicyInvalid

if TYPE_CHECKING:
    import ssl

__all__ = ["HttpOptions", "HttpTarget", "parse"]

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
        raise PolicyInvalid(f"{_shown(parts)!r} is no server's URL; write https://host:port")
    if parts.username:
        raise PolicyInvalid("a server's URL has no user; write the token as a password: https://:TOKEN@host")
    said = {**_url_options(parts), **given}
    if parts.password:
        said.setdefault("token", unquote(parts.password))
    options = HttpOptions(**said)
    return HttpTarget(_shown(parts), options.token or _read(options.token_file), options)


def _shown(parts: SplitResult) -> str:
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


def _url_options(parts: SplitResult) -> dict[str, Any]:
    kinds: dict[str, Callable[[str], Any]] = {each.name: each.type for each in fields(HttpOptions)}
    said: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in kinds:
            near = get_close_matches(name, kinds, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(kinds)}"
            raise PolicyInvalid(f"{_shown(parts)} has the unknown option {name}; {hint}")
        try:
            said[name] = kinds[name](text)
        except ValueError:
            raise PolicyInvalid(f"{_shown(parts)}: {name} is {text!r}; it must be a number") from None
    return said


def _read(file: str) -> str:
    if not file:
        return ""
    try:
        with Path(file).open(encoding="ascii") as opened:
            return opened.read(TOKEN_CHARS_MAX).strip()
    except (OSError, UnicodeError) as error:
        raise PolicyInvalid(f"token_file {file} cannot be read: {error}") from error
