"""PostgreSQL: a loop inside the server and single rows, in a schema of their own."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from semel.cli.bench.measure import Job, Scratch, new_name, with_options
from semel.cli.output import BAD_CONFIGURATION, CommandExit
from semel.stores.postgres import from_url
from semel.stores.postgres.errors import to_store_error

__all__ = ["RawPostgres", "scratch"]

SINGLES = 25
ROWS_MAX = 1_000
LOOP = """
DO $$
BEGIN
    FOR round IN 1..{rounds} LOOP
        INSERT INTO {table} (digest, expires_at) SELECT gen_random_uuid(), 1 FROM generate_series(1, {size})
        ON CONFLICT (digest) DO NOTHING;
        COMMIT;
    END LOOP;
END $$
"""


class RawPostgres:
    """Raw operations of the server: 16-byte keys, one commit per batch."""

    def __init__(self, db: psycopg.Connection, schema: str) -> None:
        self.db = db
        self._table = f'"{schema}".seen'
        db.execute(f"CREATE TABLE {self._table} (digest uuid PRIMARY KEY, expires_at bigint NOT NULL)")

    def loop(self, rounds: int, size: int) -> Job:
        """Insert new digests in a loop inside the server, one commit per batch."""
        text = LOOP.format(rounds=rounds, size=size, table=self._table)
        return Job(lambda: self.db.execute(text, prepare=False), rounds * size)

    def autocommit(self, count: int = SINGLES) -> Job:
        """Insert one row per round trip and commit."""
        text = f"INSERT INTO {self._table} VALUES (gen_random_uuid(), 1) ON CONFLICT DO NOTHING"  # noqa: S608

        def run() -> None:
            for _ in range(count):
                self.db.execute(text)

        return Job(run, count)


@contextmanager
def scratch(url: str) -> Iterator[Scratch]:
    """A schema in the same database, dropped at the end."""
    place = from_url(url).place
    name = new_name()
    try:
        with psycopg.connect(**place.parameters()) as db:
            db.execute(f'CREATE SCHEMA "{name}"')
            try:
                raw = RawPostgres(db, name)
                yield Scratch(
                    kind="postgres",
                    target=with_options(url, schema=name),
                    single_limit="autocommit row",
                    single=raw.autocommit,
                    batch_limit="server-side loop of {size}",
                    batch=lambda size: raw.loop(max(1, min(SINGLES, ROWS_MAX // size)), size),
                )
            finally:
                db.close()  # an interrupt may have left a transaction open
                with psycopg.connect(**place.parameters()) as last:
                    last.execute(f'DROP SCHEMA "{name}" CASCADE')
    except psycopg.errors.InsufficientPrivilege as error:
        raise CommandExit(
            f"{place.name}: bench works in a schema of its own, and this role may not create one; use a role that may",
            BAD_CONFIGURATION,
        ) from error
    except psycopg.Error as error:
        raise to_store_error(error, place.name) from error
