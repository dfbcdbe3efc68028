"""What a type checker knows about `inbox` and `outbox`: the colour of the connection decides. Nothing here runs."""

import sqlite3
from typing import assert_type

import aiosqlite
import psycopg
import sqlalchemy.ext.asyncio
import sqlalchemy.orm

from semel import AsyncSemel, Semel
from semel.inbox import AsyncInbox, Inbox
from semel.outbox.publish import AsyncOutbox, Outbox


def blocking(
    once: Semel, plain: sqlite3.Connection, server: psycopg.Connection, session: sqlalchemy.orm.Session
) -> None:
    assert_type(once.inbox(plain), Inbox)
    assert_type(once.inbox(server), Inbox)
    assert_type(once.inbox(session), Inbox)
    assert_type(once.outbox(server), Outbox)
    once.inbox("orders.db")  # type: ignore[call-overload]


def awaited(
    once: AsyncSemel,
    sync: Semel,
    plain: aiosqlite.Connection,
    server: psycopg.AsyncConnection,
    session: sqlalchemy.ext.asyncio.AsyncSession,
    blocks: sqlite3.Connection,
) -> None:
    assert_type(once.inbox(plain), AsyncInbox)
    assert_type(once.inbox(server), AsyncInbox)
    assert_type(sync.inbox(session), AsyncInbox)
    assert_type(once.outbox(server), AsyncOutbox)
    assert_type(once.outbox(blocks), Outbox)
    once.inbox(blocks)  # type: ignore[arg-type]
