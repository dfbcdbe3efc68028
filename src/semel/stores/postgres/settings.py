"""Settings of a PostgreSQL store, checked when they are created; sync and async share them."""

import re
from typing import Any, TypedDict, Unpack
from urllib.parse import quote, urlencode

import psycopg
from msgspec import Struct
from psycopg.conninfo import conninfo_to_dict

from semel.errors import PolicyInvalid
from semel.stores.postgres.calendar import Retention
from semel.stores.postgres.schema import SCHEMA, check_schema_name

__all__ = ["PostgresOptions", "PostgresTarget"]

WAIT_MAX_S = 3600.0
DEFAULT_PORT = 5432
POOL_MAX = 1000
PLANS = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
"""For single keys there is one good plan, one index probe each. The planner must not choose another: on a table
without statistics it would, and keep it while the table grows."""
SESSION = {**PLANS, "default_transaction_isolation": "read\\ committed"}
"""The settings of a session. The statements need READ COMMITTED, whatever the role's default is."""


class PostgresOptions(TypedDict, total=False):
    """The options of a store besides its URL."""

    schema: str
    pool_max: int
    wait_s: float
    pooler: bool
    readable_keys: bool
    durable_claims: bool
    partition_step: str | None
    partition_live: str | None


class PostgresTarget(Struct, frozen=True, kw_only=True):
    """A server, a schema in it, and the options for using them."""

    conninfo: dict[str, Any]
    schema: str = SCHEMA
    pool_max: int = 4
    wait_s: float = 10.0
    pooler: bool = False
    readable_keys: bool = True
    durable_claims: bool = True
    retention: Retention = Retention()

    @classmethod
    def of(cls, url: str, **options: Unpack[PostgresOptions]) -> "PostgresTarget":
        """Parse and check a URL or connection string. Connects to nothing. Raises `PolicyInvalid`."""
        try:
            conninfo = conninfo_to_dict(url)
        except (psycopg.ProgrammingError, UnicodeError) as error:
            if (
                mine := re.search(rf"[?&]({'|'.join(PostgresOptions.__annotations__)})=([^&]*)", url)
            ) is not None:
                raise PolicyInvalid(
                    f"{mine[1]} is semel's option, not the driver's: write"
                    f" PostgresStore(url, {mine[1]}={mine[2]!r}), or pass the whole URL to semel.open() or"
                    " store_for()"
                ) from None
            raise PolicyInvalid(
                "this is not a PostgreSQL URL; write postgresql://user@host:5432/database"
            ) from error
        retention = Retention(options.get("partition_step"), options.get("partition_live"))
        own: dict[str, Any] = {
            name: value for name, value in options.items() if not name.startswith("partition")
        }
        place = cls(conninfo=conninfo, retention=retention, **own)
        check_schema_name(place.schema)
        if not 1 <= place.pool_max <= POOL_MAX:
            raise PolicyInvalid(f"pool_max is {place.pool_max}; it must lie between 1 and {POOL_MAX}")
        if not 0 < place.wait_s <= WAIT_MAX_S:
            raise PolicyInvalid(f"wait_s is {place.wait_s}; it must lie between 0 and {WAIT_MAX_S:g}")
        return place

    @property
    def name(self) -> str:
        """The URL for errors and logs: without user and password."""
        hosts = str(self.conninfo.get("host") or self.conninfo.get("hostaddr") or "localhost").split(",")
        ports = str(self.conninfo.get("port", "")).split(",")
        query: dict[str, str] = {}
        if any(host.startswith("/") for host in hosts):  # a socket folder cannot be the host part of a URL
            query = {"host": ",".join(hosts)} | ({"port": ",".join(ports)} if any(ports) else {})
            servers = ""
        else:
            ports = ports * len(hosts) if len(ports) == 1 else ports
            named = (f"[{host}]" if ":" in host else host for host in hosts)
            servers = ",".join(f"{host}:{port}".rstrip(":") for host, port in zip(named, ports, strict=False))
        if self.schema != SCHEMA:
            query["schema"] = self.schema
        asked = "?" + urlencode(query, safe="/,") if query else ""
        return f"postgresql://{servers}/{quote(self.conninfo.get('dbname', ''))}{asked}"

    @property
    def address(self) -> tuple[str, int, str] | None:
        """Host, port and database; `None` if the URL does not name one server."""
        host, port = str(self.conninfo.get("host", "")), str(self.conninfo.get("port") or DEFAULT_PORT)
        name = str(self.conninfo.get("dbname", ""))
        if not host or not name or "," in host or not port.isdecimal() or "hostaddr" in self.conninfo:
            return None
        return (host, int(port), name)

    def parameters(self) -> dict[str, Any]:
        """Return the driver's connection parameters."""
        wait_s = max(2, round(self.wait_s))
        chosen: dict[str, Any] = {
            "connect_timeout": wait_s,
            "application_name": "semel",
            "keepalives_idle": wait_s,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": wait_s * 1000,
            **self.conninfo,
            "autocommit": True,
            "prepare_threshold": None if self.pooler else 0,
        }
        if not self.pooler:  # a pooler gives each transaction another session, so a setting would not last
            ours = " ".join(f"-c {name}={value}" for name, value in SESSION.items())
            chosen["options"] = f"{ours} {self.conninfo.get('options', '')}".strip()
        return chosen
