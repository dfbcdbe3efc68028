-- A table like `marks` for consumers that declared their ids, in partitions by arrival: old marks are removed with their
-- partition. No unique index spans partitions, so one partition is the current one, in `meta` under the name `slot`, and
-- new marks go there alone. Every marking transaction holds a shared lock until it ends, and the change of the current
-- partition takes the same lock for itself alone. So two transactions that mark at the same time use the same partition,
-- whose unique index decides, and the marks in earlier partitions are all committed and visible.

ALTER TABLE {schema}.partitions ADD COLUMN parent text NOT NULL DEFAULT 'timed_records';

CREATE TABLE {schema}.timed_marks (
    slot bigint NOT NULL,       -- the lower bound of its partition
    expires_at bigint NOT NULL,
    digest uuid NOT NULL,
    consumer_id integer NOT NULL
) PARTITION BY RANGE (slot);
CREATE UNIQUE INDEX timed_marks_digest ON {schema}.timed_marks (digest, slot);

-- Which partitions can hold a live mark of a consumer. A row is written before the marks that it describes.
CREATE TABLE {schema}.mark_slots (
    consumer_id integer NOT NULL,
    slot bigint NOT NULL,
    until bigint NOT NULL,      -- all of its marks in this partition have expired by then
    newest bigint NOT NULL,     -- the time inside its ids is not later in this partition
    PRIMARY KEY (consumer_id, slot)
);

CREATE FUNCTION {schema}.slot_lock() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT hashtextextended('{schema} slot', 0) $$;

-- Marks the keys; returns the new ones. One row of NULL: nothing was marked, because the current partition has ended;
-- call `next_slot`. `times` are the times inside the ids, NULL where there is none.
-- Each statement below sees what was committed before it began. So the lock comes first, in a statement of its own: the
-- statements after it see every mark in an earlier partition. That needs READ COMMITTED.
CREATE FUNCTION {schema}.mark_in_slot(
    moment bigint, digests uuid[], consumers integer[], spans bigint[], times bigint[]
) RETURNS SETOF uuid LANGUAGE plpgsql
    SET enable_seqscan = off
    SET enable_hashjoin = off
    SET enable_mergejoin = off
    SET jit = off
    SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    current_slot bigint;
    slot_end bigint;
    oldest bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'marks in partitions need READ COMMITTED, not %', current_setting('transaction_isolation')
            USING ERRCODE = 'feature_not_supported';
    END IF;
    PERFORM pg_advisory_xact_lock_shared({schema}.slot_lock());
    SELECT p.lower, p.upper INTO current_slot, slot_end FROM {schema}.partitions AS p
        WHERE p.parent = 'timed_marks'
            AND p.lower = (SELECT m.value::bigint FROM {schema}.meta AS m WHERE m.name = 'slot');
    moment := coalesce(moment, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    IF current_slot IS NULL OR moment >= slot_end THEN
        RETURN NEXT NULL;
        RETURN;
    END IF;
    -- Rounded up, so that nearly every call finds what it needs here, and writes nothing.
    INSERT INTO {schema}.mark_slots AS s (consumer_id, slot, until, newest)
    SELECT i.consumer_id, current_slot, slot_end + max(i.span), greatest(slot_end + 300000000, max(i.time))
    FROM unnest(consumers, spans, times) AS i (consumer_id, span, "time")
    GROUP BY i.consumer_id
    HAVING NOT EXISTS (SELECT FROM {schema}.mark_slots AS k
        WHERE k.consumer_id = i.consumer_id AND k.slot = current_slot
            AND k.until >= slot_end + max(i.span) AND k.newest >= coalesce(max(i.time), k.newest))
    ORDER BY i.consumer_id
    ON CONFLICT (consumer_id, slot) DO UPDATE SET
        until = greatest(s.until, excluded.until), newest = greatest(s.newest, excluded.newest);
    SELECT min(k.slot) INTO oldest FROM {schema}.mark_slots AS k
        WHERE k.consumer_id = ANY (consumers) AND k.until > moment
            AND k.newest >= coalesce((SELECT min(i.time) FROM unnest(times) AS i ("time")), k.newest);
    RETURN QUERY
    INSERT INTO {schema}.timed_marks AS m (slot, digest, consumer_id, expires_at)
    SELECT current_slot, i.digest, i.consumer_id, moment + i.span
    FROM unnest(digests, consumers, spans, times) AS i (digest, consumer_id, span, "time")
    LEFT JOIN LATERAL (
        SELECT true AS live FROM {schema}.mark_slots AS k
        CROSS JOIN LATERAL (
            SELECT x.expires_at FROM {schema}.timed_marks AS x
            WHERE x.slot >= oldest AND x.slot <= current_slot AND x.slot = k.slot AND x.digest = i.digest LIMIT 1
        ) AS x
        WHERE k.consumer_id = i.consumer_id AND k.slot >= oldest AND k.slot <= current_slot AND k.until > moment
            AND (i.time IS NULL OR i.time <= k.newest) AND x.expires_at > moment
        ORDER BY k.slot DESC LIMIT 1  -- most duplicates come soon
    ) AS c ON true
    WHERE c.live IS NULL
    ORDER BY i.digest
    ON CONFLICT (digest, slot) DO UPDATE SET expires_at = excluded.expires_at
    WHERE m.expires_at <= moment
    RETURNING m.digest;
END $$;

-- Makes the partition of this moment the current one, if the current one has ended; waits for running marks. Returns the
-- current partition; NULL: there is none for this moment. It never goes back, whatever the clock does.
CREATE FUNCTION {schema}.next_slot(moment bigint) RETURNS bigint LANGUAGE plpgsql
    SET lock_timeout = '1s'
AS $$
DECLARE
    found bigint;
BEGIN
    moment := coalesce(moment, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    SELECT p.lower INTO found FROM {schema}.partitions AS p
        WHERE p.parent = 'timed_marks' AND p.upper > moment
            AND p.lower = (SELECT m.value::bigint FROM {schema}.meta AS m WHERE m.name = 'slot');
    IF found IS NOT NULL THEN
        RETURN found;  -- another transaction has changed it already
    END IF;
    PERFORM pg_advisory_xact_lock({schema}.slot_lock());
    SELECT p.lower INTO found FROM {schema}.partitions AS p
        WHERE p.parent = 'timed_marks' AND p.upper > moment
            AND (p.lower <= moment OR p.lower = (SELECT m.value::bigint FROM {schema}.meta AS m WHERE m.name = 'slot'))
        ORDER BY p.lower DESC LIMIT 1;
    IF found IS NOT NULL THEN
        INSERT INTO {schema}.meta AS m (name, value) VALUES ('slot', found::text)
        ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE m.value::bigint < excluded.value::bigint;
    END IF;
    RETURN found;
END $$;

UPDATE {schema}.meta SET value = '8' WHERE name = 'schema_version';
