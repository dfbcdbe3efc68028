"""Records in PostgreSQL: durable, shared by many machines, readable by operators."""

from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from psycopg import pq

from semel.errors import PolicyInvalid, StoreUnknown
from semel.runtime.extras import install_command
from semel.stores.postgres.schema import schema_sql
from semel.stores.postgres.store import PostgresStore
from semel.stores.postgres.store_async import AsyncPostgresStore

__all__ = ["AsyncPostgresStore", "PostgresStore", "from_url", "schema_sql"]

SCHEMES = ("postgresql", "postgres")
_SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
OPTIONS = ("schema", "pool_max", "wait_s", "pooler", "readable_keys", "partition_step", "partition_live")


def from_url(url: str) -> PostgresStore:
    """The store that the URL names; nothing is connected. Raises `PolicyInvalid` for options it does not know.

    Options that are not semel's own are the driver's: `sslmode`, `connect_timeout`, `application_name` ...
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or parts.fragment:
        raise PolicyInvalid("this is no PostgreSQL URL; write postgresql://user@host:5432/database")
    theirs = {each.keyword.decode() for each in pq.Conninfo.get_defaults()}
    mine: dict[str, Any] = {}
    rest: list[tuple[str, str]] = []
    for name, text in parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)):
        if name in mine or name in dict(rest):
            raise PolicyInvalid(f"the URL has the option {name} twice")
        if name in OPTIONS:
            mine[name] = _option(name, text)
        elif name in theirs:
            rest.append((name, text))
        else:
            near = get_close_matches(name, (*OPTIONS, *theirs), 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(OPTIONS)}"
            raise PolicyInvalid(f"the URL has the unknown option {name}; {hint}")
    bare = f"postgresql://{parts.netloc}{parts.path}"  # urlunsplit would drop the slashes of an empty host
    return PostgresStore(f"{bare}?{urlencode(rest, quote_via=quote)}" if rest else bare, **mine)


def _option(name: str, text: str) -> Any:
    if name in ("schema", "partition_step", "partition_live"):
        return text
    if name in ("pooler", "readable_keys"):
        if text.lower() not in _SWITCHES:
            raise PolicyInvalid(f"{name} is {text!r}; it must be true or false")
        return _SWITCHES[text.lower()]
    try:
        return int(text) if name == "pool_max" else float(text)
    except ValueError as error:
        raise PolicyInvalid(f"{name} is {text!r}; it must be a number") from error


try:
    import psycopg as _driver  # noqa: F401 - to say what to do where it is missing
except ImportError as _missing:
    raise StoreUnknown(
        f"postgresql: needs a driver; install the extra: {install_command('postgres')}"
    ) from _missing
