-- The tables of records, marks, windows and consumers.
-- Times are microseconds of the store's clock. To keep a row small they are counted from the year 2029, where six
-- bytes hold them for years in both directions, and those of a record from its fence. The view semel_events
-- converts them back: 1861920000 are the seconds from 1970 to 2029.

CREATE TABLE semel_meta (
    name TEXT PRIMARY KEY,
    value
) WITHOUT ROWID;

-- One row. Every writing transaction updates it, so that time never goes back.
CREATE TABLE semel_clock (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    last_us INTEGER NOT NULL,
    offset_us INTEGER NOT NULL
);

CREATE TABLE semel_consumers (
    id INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    consumer TEXT NOT NULL,
    mode TEXT,
    UNIQUE (tenant, consumer)
);

CREATE TABLE semel_windows (
    tenant TEXT NOT NULL,
    consumer TEXT NOT NULL,
    event_type TEXT NOT NULL,
    window_us INTEGER NOT NULL,
    PRIMARY KEY (tenant, consumer, event_type)
) WITHOUT ROWID;

CREATE TABLE semel_records (
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL,
    consumer_id INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0,   -- 0 claimed, 1 done, 2 failed, 3 unknown, 4 forgotten; +8 quarantine,
                                        -- +16 sliding, +32 has a row in semel_extras, +64 in semel_journal
    owner BLOB NOT NULL,
    fence INTEGER NOT NULL,             -- since 2029
    seen INTEGER NOT NULL DEFAULT 0,    -- fence - first_seen
    attempt INTEGER NOT NULL DEFAULT 1,
    lease INTEGER,                      -- lease_until - fence; NULL: none
    settled INTEGER DEFAULT 9999999,    -- settled_at - fence; a placeholder while claimed
    expires INTEGER,                    -- expires_at - fence; NULL: never
    purge_at INTEGER,                   -- minutes since 2029: when to check it for removal; NULL: never
    value BLOB,
    fingerprint BLOB,
    event_type TEXT,
    key TEXT                            -- for operators; the digest identifies the record
);
CREATE UNIQUE INDEX semel_records_digest ON semel_records (digest);
CREATE INDEX semel_records_purge ON semel_records (purge_at) WHERE purge_at IS NOT NULL;

CREATE TABLE semel_extras (
    id INTEGER PRIMARY KEY,     -- of the record
    steps BLOB,
    meta BLOB,
    anchor INTEGER,             -- the event's own time, if it distinguishes equal keys; since 2029
    horizon INTEGER             -- when the anchor may be forgotten; since 2029
);

CREATE TABLE semel_journal (
    id INTEGER PRIMARY KEY,     -- of the record
    payload BLOB NOT NULL
);

CREATE TABLE semel_marks (
    digest BLOB PRIMARY KEY,
    consumer_id INTEGER NOT NULL,
    expires_at INTEGER NOT NULL         -- since 2029
) WITHOUT ROWID;

CREATE VIEW semel_events AS
SELECT
    coalesce(r.key, lower(hex(r.digest))) AS event_id,
    r.event_type AS event_type,
    c.tenant AS tenant,
    c.consumer AS consumer,
    CASE r.state & 7
        WHEN 0 THEN 'claimed' WHEN 1 THEN 'done' WHEN 2 THEN 'failed' WHEN 3 THEN 'unknown'
    END AS state,
    r.attempt AS attempt,
    strftime('%Y-%m-%d %H:%M:%f', 1861920000 + (r.fence - r.seen) / 1000000.0, 'unixepoch') AS first_seen,
    CASE WHEN r.state & 7 <> 0
        THEN strftime('%Y-%m-%d %H:%M:%f', 1861920000 + (r.fence + r.settled) / 1000000.0, 'unixepoch')
    END AS processed_at,
    strftime('%Y-%m-%d %H:%M:%f', 1861920000 + (r.fence + r.expires) / 1000000.0, 'unixepoch') AS expires_at,
    CASE WHEN substr(r.value, 1, 1) = X'6A' THEN CAST(substr(r.value, 2) AS TEXT) END AS value
FROM semel_records AS r
JOIN semel_consumers AS c ON c.id = r.consumer_id
WHERE r.state & 7 <> 4;

INSERT INTO semel_clock (id, last_us, offset_us) VALUES (1, 0, 0);
INSERT INTO semel_meta (name, value) VALUES ('schema_version', 1);
