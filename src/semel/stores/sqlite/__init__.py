"""Records in one SQLite file: the embedded default, durable and shared by the processes of one computer."""

from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.errors import PolicyInvalid
from semel.stores.sqlite.schema import schema_sql
from semel.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore", "from_url", "schema_sql"]

_SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
OPTIONS = ("synchronous", "readable_keys", "adopt", "busy_wait_s")


def from_url(url: str) -> SqliteStore:
    """The store that the URL names; nothing is opened. Raises `PolicyInvalid` for options it does not know."""
    parts = urlsplit(url)
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.startswith("/") or parts.fragment:
        raise PolicyInvalid(
            f"{url!r} is no SQLite URL; write sqlite:///relative.db, or sqlite:////absolute/path.db with four slashes"
        )
    path = unquote(parts.path[1:])
    if path == ":memory:" or not path:
        raise PolicyInvalid(f"{url!r} names no file; for a store in memory use memory:")
    options: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)):
        if name in options:
            raise PolicyInvalid(f"{url!r} has the option {name} twice")
        options[name] = _option(url, name, text)
    return SqliteStore(path, **options)


def _option(url: str, name: str, text: str) -> Any:
    if name == "synchronous":
        return text.upper()
    if name in ("readable_keys", "adopt"):
        if text.lower() not in _SWITCHES:
            raise PolicyInvalid(f"{url!r}: {name} is {text!r}; it must be true or false")
        return _SWITCHES[text.lower()]
    if name == "busy_wait_s":
        try:
            return float(text)
        except ValueError as error:
            raise PolicyInvalid(
                f"{url!r}: busy_wait_s is {text!r}; it must be a number of seconds"
            ) from error
    near = get_close_matches(name, OPTIONS, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(OPTIONS)}"
    raise PolicyInvalid(f"{url!r} has the unknown option {name}; {hint}")
