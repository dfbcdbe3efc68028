"""One contender of `make bench`, in its own process and, if needed, its own environment.

`python contender.py JOB` with a job in JSON. It runs each phase (`first`: new keys; `replay`: the same keys again) and
prints one line of JSON for each: seconds on the clock, processor time of this process and of the server, latencies.
It imports semel only for contenders that use it: the environments of other libraries do not have it.
"""

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

Call = Callable[[str], Any]
"""Handles one event and returns the value that was stored."""
ACall = Callable[[str], Awaitable[Any]]
BatchCall = Callable[[list[str]], Any]

DAY_S = 86_400
LEASE_MS = 30_000
BATCH = 500
WARM_UP = 200
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def handle(key: str) -> dict[str, str]:
    """The handler: returns a value to store."""
    return {"receipt": key}


async def ahandle(key: str) -> dict[str, str]:
    """The same, awaited."""
    return {"receipt": key}


# --- processor time ---


def server_cpu_s(pid: int) -> float:
    """Return the processor seconds of a server: its process, its threads, its children, and children that ended.

    The scheduler counts in nanoseconds, but not for children that ended: those are counted in steps of 10 ms.
    """
    if not pid:
        return 0.0
    spent_ns, ended_ticks, waiting = 0, 0, [pid]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(OSError):
            ended_ticks += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[13:15]))
            for task in (process / "task").iterdir():
                spent_ns += int((task / "schedstat").read_text().split()[0])
                waiting += map(int, (task / "children").read_text().split())
    return spent_ns / 1e9 + ended_ticks / TICKS_PER_S


class Meter:
    """Measures one phase."""

    def __init__(self, server_pid: int, size_command: list[str]) -> None:
        self._pid = server_pid
        self._size_command = size_command
        self.latencies: list[float] = []

    @contextlib.contextmanager
    def phase(self, name: str, count: int) -> Iterator[None]:
        """Print the cost of the block per event, in microseconds, and the bytes stored by a first phase."""
        self.latencies.clear()
        held = self._stored_bytes() if name == "first" else None
        server, client, clock = server_cpu_s(self._pid), time.process_time(), time.perf_counter()
        yield
        wall, client = time.perf_counter() - clock, time.process_time() - client
        server = server_cpu_s(self._pid) - server
        report = {
            "phase": name, "events": count, "rate": count / wall, "client_us": client * 1e6 / count,
            "server_us": server * 1e6 / count,
        }  # fmt: skip
        if self.latencies:
            ordered = sorted(self.latencies)
            report |= {
                "p50_us": ordered[len(ordered) // 2] * 1e6,
                "p99_us": ordered[len(ordered) * 99 // 100] * 1e6,
            }
        if held is not None:
            report["bytes"] = ((self._stored_bytes() or 0) - held) / count
        print(json.dumps(report), flush=True)

    def _stored_bytes(self) -> int | None:
        """Return the bytes that the store holds now; `None`: not to be measured."""
        if not self._size_command:
            return None
        return int(subprocess.run(self._size_command, capture_output=True, check=True).stdout)


# --- by hand ---

CLAIM = """
local stored = redis.call('GET', KEYS[1])
if stored then return stored end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return false
"""
COMPLETE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""


@contextlib.contextmanager
def by_hand_redis(url: str) -> Iterator[Call]:
    """Two scripts: take the key or read it, then compare and store."""
    import redis

    client = redis.Redis.from_url(url)
    claim, complete = client.register_script(CLAIM), client.register_script(COMPLETE)

    def call(key: str) -> Any:
        owner = b"0" + os.urandom(16)
        stored: Any = claim(keys=[f"hand:{key}"], args=[owner, LEASE_MS])
        if stored is None:
            value = handle(key)
            complete(keys=[f"hand:{key}"], args=[owner, b"1" + json.dumps(value).encode(), DAY_S])
            return value
        assert stored[:1] == b"1", "another worker holds it"
        return json.loads(stored[1:])

    yield call
    client.close()


@contextlib.contextmanager
def by_hand_postgres(url: str) -> Iterator[Call]:
    """An insert that may conflict, then an update; each is its own transaction."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS hand (key text PRIMARY KEY, owner bytea NOT NULL, lease_until timestamptz,"
            " value text, expires_at timestamptz)"
        )

        def call(key: str) -> Any:
            owner = os.urandom(16)
            won = connection.execute(
                "INSERT INTO hand (key, owner, lease_until) VALUES (%s, %s, now() + interval '30 s')"
                " ON CONFLICT (key) DO NOTHING",
                (key, owner),
            )
            if won.rowcount:
                value = handle(key)
                connection.execute(
                    "UPDATE hand SET value = %s, expires_at = now() + interval '1 day' WHERE key = %s AND owner = %s",
                    (json.dumps(value), key, owner),
                )
                return value
            row = connection.execute("SELECT value FROM hand WHERE key = %s", (key,)).fetchone()
            assert row is not None, "the row was there a moment ago"
            return json.loads(row[0])

        yield call


@contextlib.contextmanager
def transaction_postgres(url: str) -> Iterator[Call]:
    """A row in a table of keys and the effect, in one transaction."""
    import psycopg

    with psycopg.connect(url, autocommit=False) as connection:
        connection.execute("CREATE TABLE seen (key text PRIMARY KEY)")
        connection.execute("CREATE TABLE effects (key text)")
        connection.commit()

        def call(key: str) -> Any:
            made = connection.execute("INSERT INTO seen (key) VALUES (%s) ON CONFLICT DO NOTHING", (key,))
            if made.rowcount:
                connection.execute("INSERT INTO effects (key) VALUES (%s)", (key,))
            connection.commit()
            return handle(key)

        yield call


@contextlib.contextmanager
def semel_inbox(url: str) -> Iterator[Call]:
    """The same with an inbox."""
    import psycopg

    import semel

    with (
        semel.open(url, consumer="bench", mode="inbox") as once,
        psycopg.connect(url, autocommit=False) as connection,
    ):
        connection.execute("CREATE TABLE effects (key text)")
        connection.commit()

        def call(key: str) -> Any:
            if once.inbox(connection).first(key):
                connection.execute("INSERT INTO effects (key) VALUES (%s)", (key,))
            connection.commit()
            return handle(key)

        yield call


@contextlib.contextmanager
def by_hand_sqlite(url: str) -> Iterator[Call]:
    """The same on a file, with the durability of semel's default."""
    connection = sqlite3.connect(f"{url.removeprefix('sqlite:///')}-hand", isolation_level=None)
    connection.execute("PRAGMA journal_mode=wal")
    connection.execute("PRAGMA synchronous=full")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS hand (key TEXT PRIMARY KEY, owner BLOB NOT NULL, lease_until REAL, value TEXT,"
        " expires_at REAL) WITHOUT ROWID"
    )

    def call(key: str) -> Any:
        owner, now = os.urandom(16), time.time()
        won = connection.execute(
            "INSERT INTO hand (key, owner, lease_until) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            (key, owner, now + LEASE_MS / 1000),
        )
        if won.rowcount:
            value = handle(key)
            connection.execute(
                "UPDATE hand SET value = ?, expires_at = ? WHERE key = ? AND owner = ?",
                (json.dumps(value), now + DAY_S, key, owner),
            )
            return value
        row = connection.execute("SELECT value FROM hand WHERE key = ?", (key,)).fetchone()
        return json.loads(row[0])

    yield call
    connection.close()


# --- semel ---


def value_of(outcome: Any) -> Any:
    """Return the value of an outcome; here every outcome is `Done`."""
    return outcome.value


@contextlib.contextmanager
def semel_single(url: str) -> Iterator[Call]:
    """`run`, one call at a time."""
    import semel

    with semel.open(url, consumer="bench") as once:
        yield lambda key: value_of(once.run(key, handle, key))


@contextlib.contextmanager
def semel_unwaited(url: str) -> Iterator[Call]:
    """`run`, with claims that are answered before they are on disk."""
    with semel_single(f"{url}?durable_claims=false") as call:
        yield call


@contextlib.contextmanager
def semel_batches(url: str) -> Iterator[BatchCall]:
    """`run_many`."""
    import semel

    with semel.open(url, consumer="bench") as once:

        def call(keys: list[str]) -> Any:
            deliveries = [(key, key) for key in keys]
            return [value_of(outcome) for outcome in once.run_many(deliveries, handle)]

        yield call


@contextlib.asynccontextmanager
async def semel_tasks(url: str) -> Any:
    """`await run`."""
    import semel

    async with semel.aopen(url, consumer="bench") as once:

        async def call(key: str) -> Any:
            return value_of(await once.run(key, ahandle, key))

        yield call


# --- others ---


@contextlib.asynccontextmanager
async def idemkit_tasks(url: str) -> Any:
    """The decorator of idemkit in its native async form."""
    from idemkit import InMemoryBackend, MethodConfig, PostgresBackend, RedisBackend, idempotent

    backend: Any
    if url.startswith("redis"):
        backend = RedisBackend.from_url(url)
    elif url.startswith("postgresql"):
        from idemkit.backends.postgres import init_pg

        await init_pg(url)
        backend = PostgresBackend.from_url(url)
    else:
        backend = InMemoryBackend()

    @idempotent(backend=backend, config=MethodConfig(key_fields=["key"]))  # type: ignore[untyped-decorator]
    async def call(key: str) -> dict[str, str]:
        return await ahandle(key)

    yield call
    close = getattr(backend, "aclose", None) or getattr(backend, "close", None)
    if close is not None:
        await close()


@contextlib.contextmanager
def powertools_single(url: str) -> Iterator[Call]:
    """aws-lambda-powertools with its Redis persistence."""
    os.environ.setdefault("POWERTOOLS_SERVICE_NAME", "bench")
    import warnings

    import redis
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.redis import RedisCachePersistenceLayer

    warnings.simplefilter("ignore")  # without a Lambda context it warns at every call
    client: Any = redis.Redis.from_url(
        url, decode_responses=True
    )  # its protocol is older than redis-py's types
    layer = RedisCachePersistenceLayer(client=client)
    config = IdempotencyConfig(event_key_jmespath="key", expires_after_seconds=DAY_S)

    @idempotent_function(data_keyword_argument="event", persistence_store=layer, config=config)  # type: ignore[untyped-decorator]
    def work(event: dict[str, str]) -> dict[str, str]:
        return handle(event["key"])

    yield lambda key: work(event={"key": key})


@contextlib.contextmanager
def dbos_single(url: str) -> Iterator[Call]:
    """A DBOS workflow per event; its id is the key."""
    from dbos import DBOS, SetWorkflowID

    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})

    @DBOS.workflow()  # type: ignore[untyped-decorator]
    def work(key: str) -> dict[str, str]:
        return handle(key)

    DBOS.launch()

    def call(key: str) -> Any:
        with SetWorkflowID(key):
            return work(key)

    yield call
    DBOS.destroy()


# --- HTTP ---

ANSWER = b'{"id": "ch_1"}'
BODY = b'{"amount": 500, "currency": "eur"}'


async def asgi_app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - as ASGI calls it
    """An application that answers at once."""
    await receive()
    await send(
        {"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"application/json")]}
    )
    await send({"type": "http.response.body", "body": ANSWER, "more_body": False})


def request_caller(middleware: Any) -> ACall:
    """Return a call that sends one POST request with the key to the middleware, without a server."""

    async def receive() -> Any:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def call(key: str) -> Any:
        bodies: list[bytes] = []

        async def send(message: Any) -> None:
            bodies.append(message.get("body", b""))

        scope = {
            "type": "http", "method": "POST", "path": "/charges", "raw_path": b"/charges", "query_string": b"",
            "headers": [
                (b"host", b"shop.example"), (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(BODY)), (b"authorization", b"Bearer x"),
                (b"idempotency-key", uuid.uuid5(uuid.NAMESPACE_OID, key).hex.encode()),
            ],
            "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
            "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        await middleware(scope, receive, send)
        assert json.loads(b"".join(bodies)) == {"id": "ch_1"}
        return handle(key)

    return call


@contextlib.asynccontextmanager
async def semel_http(url: str) -> Any:
    """The ASGI middleware of semel."""
    import semel
    from semel.http.asgi import AsgiIdempotency, by_authorization

    async with semel.aopen(url, consumer="bench") as once:
        yield request_caller(AsgiIdempotency(asgi_app, once, caller=by_authorization))


@contextlib.asynccontextmanager
async def header_http(_url: str) -> Any:
    """The middleware asgi-idempotency-header with its store in memory."""
    from importlib import import_module

    header = import_module("idempotency_header_middleware")
    backends = import_module("idempotency_header_middleware.backends")
    yield request_caller(header.IdempotencyHeaderMiddleware(asgi_app, backends.MemoryBackend()))


CONTENDERS: dict[str, Any] = {
    "by hand": {"redis": by_hand_redis, "postgresql": by_hand_postgres, "sqlite": by_hand_sqlite},
    "by hand, inbox": transaction_postgres,
    "semel": semel_single,
    "semel, inbox": semel_inbox,
    "semel, unwaited": semel_unwaited,
    "semel, http": semel_http,
    "asgi-idempotency-header": header_http,
    "semel, batches": semel_batches,
    "semel, tasks": semel_tasks,
    "idemkit": idemkit_tasks,
    "powertools": powertools_single,
    "dbos": dbos_single,
}


# --- shapes ---


def run_single(call: Call, keys: list[str], meter: Meter) -> None:
    """One call at a time, each timed."""
    for phase in ("first", "replay"):
        with meter.phase(phase, len(keys)):
            for key in keys:
                start = time.perf_counter()
                value = call(key)
                meter.latencies.append(time.perf_counter() - start)
                assert value == {"receipt": key}


def run_batches(call: BatchCall, keys: list[str], meter: Meter) -> None:
    """Batches of 500."""
    for phase in ("first", "replay"):
        with meter.phase(phase, len(keys)):
            for start in range(0, len(keys), BATCH):
                part = keys[start : start + BATCH]
                assert call(part) == [{"receipt": key} for key in part]


async def run_tasks(opened: Any, tasks: int, keys: list[str], meter: Meter) -> None:
    """This many callers at once in one event loop."""
    async with opened as call:

        async def work(mine: list[str]) -> None:
            for key in mine:
                start = time.perf_counter()
                value = await call(key)
                meter.latencies.append(time.perf_counter() - start)
                assert value == {"receipt": key}

        await work([f"warm-{key}" for key in keys[:WARM_UP]])
        for phase in ("first", "replay"):
            with meter.phase(phase, len(keys)):
                await asyncio.gather(*(work(keys[at::tasks]) for at in range(tasks)))


def main() -> None:
    """Carry out the job."""
    job = json.loads(sys.argv[1])
    contender, url, tasks = CONTENDERS[job["contender"]], job["url"], job["tasks"]
    if isinstance(contender, dict):
        contender = contender[url.partition(":")[0]]
    keys = [f"{job['run']}-{at:08d}-0000-0000-0000" for at in range(job["events"])]
    meter = Meter(job["server_pid"], job["size_command"])
    if tasks:
        asyncio.run(run_tasks(contender(url), tasks, keys, meter))
        return
    with contender(url) as call:
        if job["contender"] == "semel, batches":
            call([f"warm-{key}" for key in keys[:WARM_UP]])
            run_batches(call, keys, meter)
        else:
            for key in keys[:WARM_UP]:
                call(f"warm-{key}")
            run_single(call, keys, meter)


if __name__ == "__main__":
    main()
