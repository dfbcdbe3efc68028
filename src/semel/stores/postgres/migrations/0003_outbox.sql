-- Messages that commit with the caller's own work, and are published in the order of `seq`.
-- Times are microseconds since 1970 of the server's clock. A message written by hand needs only id, event_type,
-- source and payload; with an aggregate, writers of one aggregate have to take turns, or its order is undefined.

CREATE TABLE {schema}.outbox (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    id uuid PRIMARY KEY,            -- created once, or derived from the event whose handler wrote it
    created_at bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    not_before bigint,              -- NULL: at once
    next_at bigint NOT NULL DEFAULT 0,  -- the next try; while later than now, its aggregate is stopped
    settled_at bigint,              -- published or dropped; NULL: neither
    keep_us bigint NOT NULL DEFAULT 0,  -- how long it stays after that, at least: the writer's window
    gone_at bigint,                 -- when it may be removed; NULL: not settled
    state smallint NOT NULL DEFAULT 0,  -- 0 pending, 1 published, 2 dead, 3 dropped
    attempts smallint NOT NULL DEFAULT 0,
    shard smallint NOT NULL GENERATED ALWAYS AS (mod(mod(
        CASE WHEN aggregate_id IS NULL THEN uuid_hash(id) ELSE hashtext(aggregate_id) # hashtext(aggregate_type) END,
        64) + 64, 64)) STORED,
    aggregate_type text COLLATE "C",
    aggregate_id text COLLATE "C",  -- NULL: it may be published in any order
    event_type text NOT NULL,
    source text NOT NULL,
    subject text,
    destination text NOT NULL DEFAULT '',  -- empty: the relay's own
    content_type text NOT NULL DEFAULT 'application/json',
    traceparent text,
    headers text NOT NULL DEFAULT '{}',
    name text,                      -- the name that its handler gave it
    error text,                     -- why the last attempt failed
    payload bytea NOT NULL,
    CHECK ((aggregate_type IS NULL) = (aggregate_id IS NULL)),
    CHECK ((settled_at IS NULL) = (state IN (0, 2))),
    CHECK ((settled_at IS NULL) = (gone_at IS NULL))
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
CREATE INDEX outbox_unsettled ON {schema}.outbox (seq, shard) WHERE settled_at IS NULL;
CREATE INDEX outbox_stopped ON {schema}.outbox (aggregate_type, aggregate_id, seq)
    WHERE settled_at IS NULL AND next_at > 0;
CREATE INDEX outbox_gone ON {schema}.outbox (gone_at) WHERE gone_at IS NOT NULL;

-- Sessions of relays that are idle. New messages are notified only while there is one, since notifications make
-- commits queue up. A crash of the server empties the table, which is correct.
CREATE UNLOGGED TABLE {schema}.outbox_idle (
    pid integer PRIMARY KEY,
    since timestamptz NOT NULL
);

CREATE FUNCTION {schema}.outbox_tell() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.outbox_idle) THEN
        PERFORM pg_notify(TG_ARGV[0], '');
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER outbox_tell AFTER INSERT ON {schema}.outbox
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.outbox_tell('{outbox_channel}');

UPDATE {schema}.meta SET value = '3' WHERE name = 'schema_version';
