-- A table like `records` for consumers whose ids contain their time, in partitions by that time: old records are
-- removed with their partition. The time is a function of the id, so every copy of an event leads to the same
-- partition and one unique index decides. `semel purge` creates partitions ahead of time and removes them.

ALTER TABLE {schema}.consumers ADD COLUMN ids text NOT NULL DEFAULT '';  -- the kind of ids; empty: none declared
ALTER TABLE {schema}.extras ADD COLUMN id_time bigint;  -- of a record in a partition; NULL otherwise
CREATE INDEX extras_time ON {schema}.extras (id_time) WHERE id_time IS NOT NULL;

CREATE TABLE {schema}.timed_records (
    LIKE {schema}.records INCLUDING CONSTRAINTS,
    id_time bigint NOT NULL     -- the time inside the id
) PARTITION BY RANGE (id_time);
CREATE UNIQUE INDEX timed_records_id ON {schema}.timed_records (id_time, digest);

CREATE TABLE {schema}.partitions (
    name text PRIMARY KEY,      -- a table of this schema: a partition of timed_records, or one being removed
    lower bigint NOT NULL,
    upper bigint NOT NULL       -- exclusive
);

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
FROM (
    SELECT digest, key, event_type, consumer_id, state, attempt, first_seen, fence, lease_until, settled_at,
        expires_at, value
    FROM {schema}.records
    UNION ALL
    SELECT digest, key, event_type, consumer_id, state, attempt, first_seen, fence, lease_until, settled_at,
        expires_at, value
    FROM {schema}.timed_records
) AS r
JOIN {schema}.consumers AS c ON c.id = r.consumer_id
WHERE r.state & 7 <> 4;

UPDATE {schema}.meta SET value = '2' WHERE name = 'schema_version';
