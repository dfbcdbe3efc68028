-- What a record, a mark, a window and a consumer look like in the database.
-- Times are microseconds since 1970 of the server's clock. The view `events` shows them as timestamps.

CREATE TABLE {schema}.meta (
    name text PRIMARY KEY,
    value text NOT NULL
);

CREATE TABLE {schema}.consumers (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant text COLLATE "C" NOT NULL,
    consumer text COLLATE "C" NOT NULL,
    mode text,
    UNIQUE (tenant, consumer)
);

CREATE TABLE {schema}.windows (
    tenant text COLLATE "C" NOT NULL,
    consumer text COLLATE "C" NOT NULL,
    event_type text COLLATE "C" NOT NULL,
    window_us bigint NOT NULL,
    PRIMARY KEY (tenant, consumer, event_type)
);

-- Half of each page is left free, so that the end of a claim finds room beside its beginning and touches no index.
CREATE TABLE {schema}.records (
    fence bigint NOT NULL CHECK (fence > 0),
    lease_until bigint,         -- of a claim; NULL otherwise
    settled_at bigint,          -- of what is done, failed or unknown; NULL otherwise
    expires_at bigint,          -- exact; NULL: never
    first_seen bigint,          -- NULL: at the fence
    purge_at integer,           -- the minute since 1970 in which to look whether to remove it; NULL: never
    consumer_id integer NOT NULL,
    attempt integer NOT NULL CHECK (attempt >= 0),
    state smallint NOT NULL,    -- 0 claimed, 1 done, 2 failed, 3 unknown, 4 forgotten; +8 quarantine, +16 sliding,
                                -- +32 has a row in extras, +64 in journal
    digest uuid NOT NULL,       -- of (tenant, consumer, key): what identifies the record
    owner bytea NOT NULL,       -- empty: nobody
    fingerprint bytea,
    event_type text,
    key text COLLATE "C",       -- for people; NULL: only the digest is kept
    value bytea                 -- a byte that names the codec, then the value
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
CREATE UNIQUE INDEX records_digest ON {schema}.records (digest);
CREATE INDEX records_purge ON {schema}.records (purge_at) WHERE purge_at IS NOT NULL;

CREATE TABLE {schema}.extras (
    digest uuid PRIMARY KEY,    -- of the record, which says whether this row counts
    steps bytea,
    meta bytea,
    anchor bigint,              -- the event's own time, where equal keys are told apart by it
    horizon bigint              -- when the anchor may be forgotten
);

CREATE TABLE {schema}.journal (
    digest uuid PRIMARY KEY,    -- of the record, which says whether this row counts
    payload bytea NOT NULL
);

CREATE TABLE {schema}.marks (
    expires_at bigint NOT NULL,
    digest uuid NOT NULL,
    consumer_id integer NOT NULL
);
CREATE UNIQUE INDEX marks_digest ON {schema}.marks (digest);

-- Who listens for changes: where nobody does, nobody is told. A crash of the server empties it, which is right.
CREATE UNLOGGED TABLE {schema}.listeners (
    pid integer PRIMARY KEY,
    since timestamptz NOT NULL
);

CREATE FUNCTION {schema}.text_of(given bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
    SET search_path = pg_catalog AS $$
BEGIN
    RETURN convert_from(given, 'UTF8');
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

CREATE VIEW {schema}.events AS
SELECT
    coalesce(r.key, r.digest::text) AS event_id,
    r.event_type,
    c.tenant,
    c.consumer,
    CASE r.state & 7
        WHEN 0 THEN 'claimed' WHEN 1 THEN 'done' WHEN 2 THEN 'failed' WHEN 3 THEN 'unknown'
    END AS state,
    r.attempt,
    to_timestamp(coalesce(r.first_seen, r.fence) / 1000000.0) AS first_seen,
    to_timestamp(r.lease_until / 1000000.0) AS lease_until,
    to_timestamp(r.settled_at / 1000000.0) AS processed_at,
    to_timestamp(r.expires_at / 1000000.0) AS expires_at,
    CASE WHEN substr(r.value, 1, 1) IN ('\x6a', '\x6f') THEN {schema}.text_of(substr(r.value, 2)) END AS value
FROM {schema}.records AS r
JOIN {schema}.consumers AS c ON c.id = r.consumer_id
WHERE r.state & 7 <> 4;

INSERT INTO {schema}.meta (name, value) VALUES ('schema_version', '1');
