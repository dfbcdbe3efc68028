-- The tables of records, marks, windows and consumers.
-- Times are microseconds since 1970 of the server's clock. The view `events`, created later, shows them as timestamps.

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

-- Half of each page is left free, so that the settle of a claim has room on the same page and touches no index.
CREATE TABLE {schema}.records (
    fence bigint NOT NULL CHECK (fence > 0),
    lease_until bigint,         -- of a claim; NULL otherwise
    settled_at bigint,          -- of what is done, failed or unknown; NULL otherwise
    expires_at bigint,          -- exact; NULL: never
    first_seen bigint,          -- NULL: at the fence
    purge_at integer,           -- minutes since 1970: when to check it for removal; NULL: never
    consumer_id integer NOT NULL,
    attempt integer NOT NULL CHECK (attempt >= 0),
    state smallint NOT NULL,    -- 0 claimed, 1 done, 2 failed, 3 unknown, 4 forgotten; +8 quarantine, +16 sliding,
                                -- +32 has a row in extras, +64 in journal
    digest uuid NOT NULL,       -- of (tenant, consumer, key): identifies the record
    owner bytea NOT NULL,       -- empty: nobody
    fingerprint bytea,
    event_type text,
    key text COLLATE "C",       -- for operators; NULL: only the digest is stored
    value bytea                 -- a byte that names the codec, then the value
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
CREATE UNIQUE INDEX records_digest ON {schema}.records (digest);
CREATE INDEX records_purge ON {schema}.records (purge_at) WHERE purge_at IS NOT NULL;

CREATE TABLE {schema}.extras (
    digest uuid PRIMARY KEY,    -- of the record; this row counts only if the record's state has its flag
    steps bytea,
    meta bytea,
    anchor bigint,              -- the event's own time, if it distinguishes equal keys
    horizon bigint              -- when the anchor may be forgotten
);

CREATE TABLE {schema}.journal (
    digest uuid PRIMARY KEY,    -- of the record; this row counts only if the record's state has its flag
    payload bytea NOT NULL
);

CREATE TABLE {schema}.marks (
    expires_at bigint NOT NULL,
    digest uuid NOT NULL,
    consumer_id integer NOT NULL
);
CREATE UNIQUE INDEX marks_digest ON {schema}.marks (digest);

-- Sessions that listen for changes; if there are none, no notification is sent. A crash of the server empties the
-- table, which is correct.
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

INSERT INTO {schema}.meta (name, value) VALUES ('schema_version', '1');
