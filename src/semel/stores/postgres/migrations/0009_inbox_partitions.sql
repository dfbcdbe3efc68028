-- The functions of an inbox whose consumer declared ids that contain their time: its records are in `timed_records`.
-- The time is a function of the id, so every copy of an event leads to the same partition, whatever transaction it is in
-- and however long that takes, and one unique index decides.
-- A statement that reads is planned with the times that it is about (EXECUTE, or a custom plan), so that it opens and
-- locks their partitions alone: the locks last as long as the caller's transaction.

-- As inbox_first, with more parameters and one more verdict.
--   times: array literal, the times inside the ids;  moment: the time to use, NULL: the clock's
--   verdict: also 'late': the id is too old or too new for a new record (detail: its age in microseconds), and
--   'unplaced': there is no partition for one of the times
CREATE FUNCTION {schema}.inbox_first_timed(
    known_identity text, known_tenant text, known_consumer text, digests text, names text, type_name text,
    span bigint, attempt_owner bytea, wait_ms integer, print bytea, times text, moment bigint,
    OUT verdict text, OUT detail text, OUT place integer, OUT firsts text
) LANGUAGE plpgsql
    SET lock_timeout = '2s'
    SET enable_seqscan = off
    SET jit = off
    SET plan_cache_mode = force_custom_plan
AS $$
DECLARE
    number integer;
    mode_found text;
    wanted uuid[] := digests::uuid[];
    named text[] := names::text[];
    timed bigint[] := times::bigint[];
    oldest bigint;
    newest bigint;
    low bigint;
    live bigint;
    new_ones text;
    raced integer;
    broken text;
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
    SELECT min(i), max(i) INTO oldest, newest FROM unnest(timed) AS i;
    PERFORM set_config('lock_timeout', wait_ms::text, true);
    BEGIN  -- a savepoint: an error inside leaves the caller's transaction unchanged
        FOR round IN 1..8 LOOP
            SELECT m.value::bigint INTO low FROM {schema}.meta AS m WHERE m.name = 'low_water';
            SELECT m.value::bigint INTO live FROM {schema}.meta AS m WHERE m.name = 'partition_live';
            WITH t AS MATERIALIZED (
                SELECT coalesce(moment, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
            ),
            inp AS MATERIALIZED (
                SELECT * FROM unnest(wanted, named, timed) WITH ORDINALITY AS i (digest, key, id_time, n)
            ),
            cur AS MATERIALIZED (
                SELECT i.*, t.now, r.lease_until,
                    CASE
                        WHEN r.state & 7 = 0 AND r.lease_until > t.now THEN 3
                        WHEN r.state & 7 = 3 OR (r.state & 15 = 8 AND r.owner <> ''::bytea) THEN 7
                        WHEN r.state IS NULL OR r.state & 7 = 4 OR r.expires_at <= t.now THEN
                            CASE WHEN i.id_time < low OR i.id_time > t.now + 300000000 OR t.now - i.id_time > live - span
                                THEN 6 ELSE 0 END
                        WHEN substr(r.fingerprint, 1, 1) = substr(print, 1, 1) AND r.fingerprint <> print THEN 5
                        WHEN r.state & 7 = 0 THEN 0
                        ELSE 1
                    END AS standing
                FROM t CROSS JOIN inp AS i
                LEFT JOIN LATERAL (
                    SELECT * FROM {schema}.timed_records AS x
                    WHERE x.id_time >= oldest AND x.id_time <= newest AND x.id_time = i.id_time AND x.digest = i.digest
                    LIMIT 1
                ) AS r ON true
            ),
            won AS (
                INSERT INTO {schema}.timed_records AS r (id_time, digest, state, owner, fence, settled_at, attempt,
                    expires_at, purge_at, consumer_id, event_type, key, fingerprint)
                SELECT c.id_time, c.digest, 1, attempt_owner, c.now, c.now, 1, c.now + span,
                    (c.now + span + 59999999) / 60000000, number, type_name, c.key, print
                FROM cur AS c WHERE c.standing = 0
                ORDER BY c.digest
                ON CONFLICT (id_time, digest) DO UPDATE SET
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
                (array_agg(CASE c.standing WHEN 3 THEN 'claimed' WHEN 5 THEN 'mismatch' WHEN 6 THEN 'late'
                    WHEN 7 THEN 'unknown' END ORDER BY c.standing, c.n) FILTER (WHERE c.standing > 1))[1],
                (array_agg(CASE c.standing WHEN 3 THEN c.lease_until - c.now ELSE c.now - c.id_time END
                    ORDER BY c.standing, c.n) FILTER (WHERE c.standing > 1))[1]
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
        WHEN check_violation THEN
            GET STACKED DIAGNOSTICS broken = CONSTRAINT_NAME;
            IF broken <> '' THEN
                RAISE;
            END IF;
            verdict := 'unplaced';
        WHEN SQLSTATE 'SEML0' THEN
            NULL;
    END;
END $$;

-- As inbox_first_one. NULL: ask inbox_first_timed.
CREATE FUNCTION {schema}.inbox_first_one_timed(
    known_identity text, known_tenant text, known_consumer text, wanted uuid, name text, type_name text,
    span bigint, attempt_owner bytea, wait_ms integer, print bytea, wanted_time bigint, moment bigint
) RETURNS integer LANGUAGE plpgsql
    SET lock_timeout = '2s'
    SET enable_seqscan = off
    SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    number integer;
    low bigint;
    live bigint;
    now bigint;
    seen record;
    checked text := 'semel.identity_' || '{schema}.records'::regclass::oid;  -- a setting of the session
BEGIN
    SELECT c.id, (SELECT m.value::bigint FROM {schema}.meta AS m WHERE m.name = 'low_water'),
            (SELECT m.value::bigint FROM {schema}.meta AS m WHERE m.name = 'partition_live')
        INTO number, low, live FROM {schema}.consumers AS c
        WHERE c.tenant = known_tenant AND c.consumer = known_consumer AND c.mode = 'inbox';
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF current_setting(checked, true) IS DISTINCT FROM known_identity THEN
        IF known_identity <> {schema}.identity() THEN
            RETURN NULL;
        END IF;
        PERFORM set_config(checked, known_identity, false);
    END IF;
    now := coalesce(moment, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    EXECUTE 'SELECT r.state, r.expires_at, r.fingerprint FROM {schema}.timed_records AS r'
        ' WHERE r.id_time = $1 AND r.digest = $2' INTO seen USING wanted_time, wanted;
    IF seen.state IS NOT NULL THEN
        RETURN CASE WHEN seen.state & 7 IN (1, 2) AND (seen.expires_at IS NULL OR seen.expires_at > now)
            AND (print IS NULL OR seen.fingerprint IS NULL OR seen.fingerprint = print) THEN 0 END;
    END IF;
    IF wanted_time < low OR wanted_time > now + 300000000 OR now - wanted_time > live - span THEN
        RETURN NULL;
    END IF;
    PERFORM set_config('lock_timeout', wait_ms::text, true);
    BEGIN  -- a savepoint: an error inside leaves the caller's transaction unchanged
        INSERT INTO {schema}.timed_records (id_time, digest, state, owner, fence, settled_at, attempt, expires_at,
            purge_at, consumer_id, event_type, key, fingerprint)
        VALUES (wanted_time, wanted, 1, attempt_owner, now, now, 1, now + span,
            (now + span + 59999999) / 60000000, number, type_name, name, print)
        ON CONFLICT (id_time, digest) DO NOTHING;
        RETURN CASE WHEN FOUND THEN 1 END;
    EXCEPTION
        WHEN lock_not_available THEN
            RETURN -1;
        WHEN check_violation THEN
            RETURN NULL;
    END;
END $$;

UPDATE {schema}.meta SET value = '9' WHERE name = 'schema_version';
