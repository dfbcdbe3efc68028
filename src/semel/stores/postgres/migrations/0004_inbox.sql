-- The function that the inbox calls inside the caller's transaction: one statement, with any driver.

-- Identifies this table: a copy of the database, or a table of the same name elsewhere, has another identity.
CREATE FUNCTION {schema}.identity() RETURNS text LANGUAGE plpgsql STABLE AS $$  -- plpgsql caches its plan, unlike SQL
BEGIN
    RETURN (SELECT concat_ws('/', c.system_identifier, d.oid, '{schema}.records'::regclass::oid)
        FROM pg_control_system() AS c, pg_database AS d WHERE d.datname = current_database());
END $$;

-- Marks the keys as done, all or none, waiting at most wait_ms for each transaction that holds one of them.
--   digests, names: array literals, in the order of the digests; names is NULL if only digests are stored
--   print: the fingerprint of the payload, for one key; NULL: not to be compared
--   verdict: 'marked', or why nothing was marked: 'elsewhere', 'mode', 'waited', 'claimed', 'mismatch', 'unknown'
--   detail: the mode found, or the rest of the lease in microseconds;  place: the number of that key, from 1
--   firsts: for each key 1 if it was new, 0 if it was done
-- The settings below apply inside the function; the old values are restored when it ends, also after an error. The
-- planner must probe the index for each key: on a table without statistics it would choose another plan, and keep it.
CREATE FUNCTION {schema}.inbox_first(
    known_identity text, known_tenant text, known_consumer text, digests text, names text, type_name text,
    span bigint, attempt_owner bytea, wait_ms integer, print bytea,
    OUT verdict text, OUT detail text, OUT place integer, OUT firsts text
) LANGUAGE plpgsql
    SET lock_timeout = '2s'
    SET enable_seqscan = off
    SET jit = off
    SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    number integer;
    mode_found text;
    wanted uuid[] := digests::uuid[];
    named text[] := names::text[];
    new_ones text;
    raced integer;
BEGIN
    IF known_identity <> {schema}.identity() THEN
        verdict := 'elsewhere';
        RETURN;
    END IF;
    SELECT c.id, c.mode INTO number, mode_found FROM {schema}.consumers AS c
        WHERE c.tenant = known_tenant AND c.consumer = known_consumer;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'consumer % was entered after this transaction took its snapshot', known_consumer
            USING ERRCODE = 'serialization_failure', HINT = 'Begin the transaction again.';
    END IF;
    IF mode_found IS DISTINCT FROM 'inbox' THEN
        verdict := 'mode';
        detail := mode_found;
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', wait_ms::text, true);
    BEGIN  -- a savepoint: an error inside leaves the caller's transaction unchanged
        FOR round IN 1..8 LOOP
            WITH t AS MATERIALIZED (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now),
            inp AS MATERIALIZED (
                SELECT * FROM unnest(wanted, named) WITH ORDINALITY AS i (digest, key, n)
            ),
            cur AS MATERIALIZED (
                SELECT i.*, t.now, r.lease_until,
                    CASE
                        WHEN r.state IS NULL OR r.state & 7 = 4 THEN 0
                        WHEN r.state & 7 = 0 AND r.lease_until > t.now THEN 3
                        WHEN r.state & 7 = 3 OR (r.state & 15 = 8 AND r.owner <> ''::bytea) THEN 7
                        WHEN r.expires_at <= t.now THEN 0
                        WHEN substr(r.fingerprint, 1, 1) = substr(print, 1, 1) AND r.fingerprint <> print THEN 5
                        WHEN r.state & 7 = 0 THEN 0
                        ELSE 1
                    END AS standing
                FROM t CROSS JOIN inp AS i
                LEFT JOIN LATERAL (SELECT * FROM {schema}.records AS x WHERE x.digest = i.digest LIMIT 1) AS r ON true
            ),
            won AS (
                INSERT INTO {schema}.records AS r (digest, state, owner, fence, settled_at, attempt, expires_at,
                    purge_at, consumer_id, event_type, key, fingerprint)
                SELECT c.digest, 1, attempt_owner, c.now, c.now, 1, c.now + span,
                    (c.now + span + 59999999) / 60000000, number, type_name, c.key, print
                FROM cur AS c WHERE c.standing = 0
                ORDER BY c.digest
                ON CONFLICT (digest) DO UPDATE SET
                    state = 1,
                    owner = excluded.owner,
                    fence = greatest(r.fence + 1, excluded.fence),
                    lease_until = NULL,
                    settled_at = excluded.settled_at,
                    value = NULL,
                    fingerprint = CASE
                        WHEN r.state & 7 = 0 AND (r.expires_at IS NULL OR r.expires_at > excluded.fence)
                        THEN coalesce(excluded.fingerprint, r.fingerprint) ELSE excluded.fingerprint END,
                    attempt = CASE WHEN r.state & 7 = 0 AND (r.expires_at IS NULL OR r.expires_at > excluded.fence)
                        THEN r.attempt + 1 ELSE 1 END,
                    first_seen = CASE WHEN r.state & 7 = 0 AND (r.expires_at IS NULL OR r.expires_at > excluded.fence)
                        THEN coalesce(r.first_seen, r.fence)
                        ELSE nullif(excluded.fence, greatest(r.fence + 1, excluded.fence)) END,
                    expires_at = excluded.expires_at,
                    purge_at = excluded.purge_at,
                    consumer_id = excluded.consumer_id,
                    event_type = excluded.event_type,
                    key = coalesce(excluded.key, r.key)
                WHERE CASE
                    WHEN r.state & 7 = 0 AND r.lease_until > excluded.fence THEN false
                    WHEN r.state & 7 = 3 OR (r.state & 15 = 8 AND r.owner <> ''::bytea) THEN false
                    ELSE r.state & 7 IN (0, 4) OR r.expires_at <= excluded.fence
                END
                RETURNING r.digest
            )
            SELECT string_agg(CASE WHEN w.digest IS NULL THEN '0' ELSE '1' END, '' ORDER BY c.n),
                count(*) FILTER (WHERE c.standing = 0 AND w.digest IS NULL),
                (array_agg(c.n ORDER BY c.standing, c.n) FILTER (WHERE c.standing > 1))[1],
                min(CASE c.standing WHEN 3 THEN 'claimed' WHEN 5 THEN 'mismatch' WHEN 7 THEN 'unknown' END),
                max(c.lease_until - c.now) FILTER (WHERE c.standing = 3)
            INTO new_ones, raced, place, verdict, detail
            FROM cur AS c LEFT JOIN won AS w ON w.digest = c.digest;
            EXIT WHEN place IS NOT NULL;
            firsts := CASE WHEN firsts IS NULL THEN new_ones ELSE (firsts::varbit | new_ones::varbit)::text END;
            EXIT WHEN raced = 0;  -- otherwise other transactions came first: read again
            verdict := 'claimed';
            detail := '5000';
        END LOOP;
        IF place IS NOT NULL OR raced > 0 THEN
            RAISE EXCEPTION USING ERRCODE = 'SEML0';  -- all or none
        END IF;
        verdict := 'marked';
        detail := NULL;
    EXCEPTION
        WHEN lock_not_available THEN
            verdict := 'waited';
        WHEN SQLSTATE 'SEML0' THEN
            NULL;
    END;
END $$;

UPDATE {schema}.meta SET value = '4' WHERE name = 'schema_version';
