-- One plain claim and one plain settle, as in most calls. Parameters have numbers, since they bypass the driver's
-- cursors. A case that these statements cannot decide is left unchanged: then `claim` or `settle` of queries.sql
-- decides. Their answers are the same as those of `claim` and `settle`.
-- The largest cost of a statement about one row is to set up its plan, so these statements have few steps. The time
-- of a statement that is its own transaction is that of its arrival: it is the same wherever it is used.

-- fragment: now
coalesce($1::bigint, (date_part('epoch', statement_timestamp()) * 1000000)::bigint)

-- fragment: unwaited
-- The commit is not waited for, of this transaction alone.
, set_config('synchronous_commit', 'off', true) AS unwaited

-- query: claim_one
-- $2 digest, $3 owner, $4 lease, $5 window, $6 consumer, $7 fingerprint, $8 event type, $9 key
-- verdict: 0 granted, 1 done, 2 failed, 3 busy, 8 not decided here. No row: another transaction was faster, after our snapshot.
-- Two rows: one that was purged after our snapshot, and the new one.
WITH won AS (
    INSERT INTO {schema}.records (digest, state, owner, fence, lease_until, attempt, expires_at, purge_at, consumer_id,
        fingerprint, event_type, key)
    VALUES ($2::uuid, 0, $3::bytea, {now}, {now} + $4::bigint, 1, {now} + $4 + $5::bigint, ({now} + $5) / 60000000 + 2,
        $6::integer, $7::bytea, $8::text, $9::text)
    ON CONFLICT (digest) DO NOTHING
    RETURNING fence{unwaited}
)
SELECT 0::smallint, fence, 0::smallint, NULL::bigint, NULL::bigint, NULL::bytea, NULL::bigint FROM won
UNION ALL
SELECT
    CASE
        WHEN $7 <> r.fingerprint THEN 8
        WHEN r.state & 7 IN (1, 2) AND r.expires_at > {now} THEN r.state & 7
        WHEN r.state & 7 = 0 AND r.lease_until > {now} AND r.owner <> $3 THEN 3
        ELSE 8
    END::smallint,
    r.fence, r.state, CASE WHEN r.state & 7 = 0 THEN r.lease_until - {now} ELSE r.settled_at END,
    coalesce(r.first_seen, r.fence), r.value, r.expires_at - {now}
FROM {schema}.records AS r
WHERE r.digest = $2

-- query: settle_one
-- $2 digest, $3 owner, $4 fence, $5 new state, $6 value, $7 window. No row: not decided here.
UPDATE {schema}.records AS r SET
    state = $5::smallint,
    settled_at = {now},
    lease_until = NULL,
    value = $6::bytea,
    expires_at = {now} + $7::bigint,
    purge_at = CASE
        WHEN r.purge_at BETWEEN ({now} + $7 + 59999999) / 60000000 AND ({now} + $7) / 60000000 + 3 THEN r.purge_at
        ELSE ({now} + $7 + 59999999) / 60000000 END
WHERE r.digest = $2::uuid AND r.owner = $3::bytea AND r.fence = $4::bigint AND r.state = 0
    AND (r.lease_until > {now} OR r.expires_at > {now})
RETURNING r.settled_at, CASE WHEN EXISTS (SELECT FROM {schema}.listeners)
    THEN pg_notify('{channel}', encode(uuid_send(r.digest), 'hex')) END
