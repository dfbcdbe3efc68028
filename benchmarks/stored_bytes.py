"""`python stored_bytes.py URL`: print how many bytes a store's data takes now. For Redis: the server's whole memory."""

import sqlite3
import sys

SIZES = (
    "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class WHERE relkind = 'r' AND oid >= 16384"
)


def stored_bytes(url: str) -> int:
    """Return the bytes."""
    if url.startswith("redis"):
        import redis

        with redis.Redis.from_url(url) as client:
            return int(client.info("memory")["used_memory"])
    if url.startswith("postgresql"):
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:
            row = connection.execute(SIZES).fetchone()
            return int(row[0]) if row else 0
    total = 0
    for path in (url.removeprefix("sqlite:///"), url.removeprefix("sqlite:///") + "-hand"):
        with sqlite3.connect(path) as file:
            pages, page_bytes = (
                file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
            )
            total += pages * page_bytes
    return total


if __name__ == "__main__":
    print(stored_bytes(sys.argv[1]))
