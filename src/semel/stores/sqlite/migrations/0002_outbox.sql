-- Messages that commit with the caller's own work, and are published in the order of `seq`.
-- Times are microseconds since 1970 of this computer's clock.

CREATE TABLE semel_outbox (
    seq INTEGER PRIMARY KEY,            -- greater than that of every row that still exists
    id TEXT NOT NULL UNIQUE,            -- created once, or derived from the event whose handler wrote it
    created_at INTEGER NOT NULL,
    not_before INTEGER,                 -- NULL: at once
    next_at INTEGER NOT NULL DEFAULT 0, -- the next try; while later than now, its aggregate is stopped
    settled_at INTEGER,                 -- published or dropped; NULL: neither
    keep_us INTEGER NOT NULL DEFAULT 0, -- how long it stays after that, at least: the writer's window
    gone_at INTEGER,                    -- when it may be removed; NULL: not settled
    state INTEGER NOT NULL DEFAULT 0,   -- 0 pending, 1 published, 2 dead, 3 dropped
    attempts INTEGER NOT NULL DEFAULT 0,
    aggregate_type TEXT,
    aggregate_id TEXT,                  -- NULL: it may be published in any order
    event_type TEXT NOT NULL,
    source TEXT NOT NULL,
    subject TEXT,
    destination TEXT NOT NULL DEFAULT '',
    content_type TEXT NOT NULL DEFAULT 'application/json',
    traceparent TEXT,
    headers TEXT NOT NULL DEFAULT '{}',
    name TEXT,                          -- the name that its handler gave it
    error TEXT,                         -- why the last attempt failed
    payload BLOB NOT NULL,
    CHECK ((aggregate_type IS NULL) = (aggregate_id IS NULL)),
    CHECK ((settled_at IS NULL) = (state IN (0, 2))),
    CHECK ((settled_at IS NULL) = (gone_at IS NULL))
);
CREATE INDEX semel_outbox_unsettled ON semel_outbox (seq) WHERE settled_at IS NULL;
CREATE INDEX semel_outbox_stopped ON semel_outbox (aggregate_type, aggregate_id, seq)
    WHERE settled_at IS NULL AND next_at > 0;
CREATE INDEX semel_outbox_gone ON semel_outbox (gone_at) WHERE gone_at IS NOT NULL;

UPDATE semel_meta SET value = 2 WHERE name = 'schema_version';
