-- Every statement of the store, by name. {schema} is the quoted schema, {name} its bare name; {now}, {running},
-- {orphaned} and {live} are the fragments at the top. The statements implement the rules of `semel.core.machine`.
-- A query that names {records} exists twice: for the table `records` and, as `<name>_timed`, for the table in
-- partitions. Text in {plain ...} is used only for the first, text in {timed ...} only for the second.
-- A statement locks rows in the order of their digests, so that overlapping batches wait for one another but never
-- deadlock. It probes the index once for each key, whatever plan the planner would choose.

-- fragment: now
(SELECT coalesce(%(now)b::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now)

-- fragment: running
(r.state & 7 = 0 AND r.lease_until > t.now)

-- fragment: orphaned
(r.state & 15 = 8 AND r.owner <> ''::bytea AND r.lease_until <= t.now)

-- fragment: free
(r.state & 7 = 0 AND r.owner = ''::bytea)

-- fragment: live
(r.expires_at IS NULL OR r.expires_at > t.now OR {running} OR {orphaned})

-- fragment: columns
r.digest, r.state, r.owner, r.fence, coalesce(r.first_seen, r.fence), r.attempt, r.lease_until, r.settled_at,
r.expires_at, r.value, r.fingerprint, r.event_type, r.errors::text, e.steps, e.meta, e.anchor, e.horizon, j.payload

-- fragment: with_lease_end
{schema}.with_error(r.errors, r.attempt, r.lease_until, jsonb_build_object('kind', 'lease ended',
    'message', 'the worker died, hung or was cut off: its lease ended before it settled', 'traceback', '',
    'worker', encode(substr(r.owner, 1, 4), 'hex')))

-- fragment: beside
LEFT JOIN LATERAL (SELECT steps, meta, anchor, horizon FROM {schema}.extras AS x
    WHERE r.state & 32 <> 0 AND x.digest = r.digest LIMIT 1) AS e ON true
LEFT JOIN LATERAL (SELECT payload FROM {schema}.journal AS x
    WHERE r.state & 64 <> 0 AND x.digest = r.digest LIMIT 1) AS j ON true

-- fragment: past_errors
CASE WHEN r.state & 15 = 8 AND r.owner <> ''::bytea AND r.lease_until <= c.now THEN {with_lease_end} ELSE r.errors END

-- fragment: outside
i.id_time < e.low OR i.id_time > t.now + 300000000 OR t.now - i.id_time > e.live - i.span

-- fragment: edge
(SELECT (SELECT value::bigint FROM {schema}.meta WHERE name = 'low_water') AS low,
    (SELECT value::bigint FROM {schema}.meta WHERE name = 'partition_live') AS live)

-- fragment: unwaited
-- The commit is not waited for, of this transaction alone. A claim in quarantine must not be lost: it is waited for.
, (SELECT set_config('synchronous_commit', 'off', true) FROM (SELECT bit_or(flags) AS flags FROM inp) AS i
    WHERE i.flags & 8 = 0) AS unwaited

-- query: claim
WITH t AS MATERIALIZED {now},{timed  e AS MATERIALIZED {edge},}
inp AS MATERIALIZED (
    SELECT * FROM unnest(%(digests)b, %(owners)b, %(leases)b, %(windows)b, %(fingerprints)b, %(types)b,
        %(event_times)b, %(flags)b, %(consumers)b, %(keys)b, %(refreshes)b{timed , %(id_times)b})
        AS i (digest, owner, lease, span, fingerprint, event_type, event_time, flags, consumer_id, key,
            refreshes{timed , id_time})
),
cur AS MATERIALIZED (
    SELECT i.*, t.now, r.state, r.lease_until, r.settled_at, r.fence, r.attempt, r.first_seen, r.value,
        r.expires_at - t.now AS rest,
        CASE
            WHEN r.state IS NULL OR NOT {live} OR r.state & 7 = 4 THEN
                CASE WHEN t.now - i.event_time > i.span{timed  OR {outside}} THEN 6 ELSE 0 END
            WHEN i.fingerprint <> r.fingerprint AND substr(i.fingerprint, 1, 1) = substr(r.fingerprint, 1, 1)
                AND r.fingerprint <> ''::bytea THEN 5
            WHEN r.state & 7 > 4 THEN 8
            WHEN {running} THEN
                CASE WHEN r.owner <> i.owner THEN 3 ELSE 8 END
            WHEN {orphaned} OR r.state & 7 = 3 THEN 7
            WHEN r.state & 7 = 0 THEN CASE WHEN r.state & 96 <> 0 THEN 8 ELSE 0 END
            WHEN i.refreshes = 1 THEN 8
            ELSE r.state & 7
        END AS verdict,
        t.now - i.event_time > i.span{timed  OR {outside}} AS late
    FROM t CROSS JOIN {timed e CROSS JOIN }inp AS i
    LEFT JOIN LATERAL (
        SELECT * FROM {records} AS x WHERE {timed x.id_time = i.id_time AND }x.digest = i.digest LIMIT 1
    ) AS r ON true
),
won AS (
    INSERT INTO {records} AS r ({timed id_time, }digest, state, owner, fence, lease_until, attempt, expires_at, purge_at,
        consumer_id, fingerprint, event_type, key)
    SELECT {timed c.id_time, }c.digest, c.flags, c.owner, c.now, c.now + c.lease,
        CASE WHEN c.late THEN 0 ELSE 1 END,  -- 0: too late, unless it takes over
        CASE WHEN c.flags & 8 = 0 THEN c.now + c.span + CASE WHEN c.flags & 16 = 0 THEN c.lease ELSE 0 END END,
        CASE WHEN c.flags & 8 = 0 THEN (c.now + c.span) / 60000000 + 2 END,
        c.consumer_id, c.fingerprint, c.event_type, c.key
    FROM cur AS c WHERE c.verdict = 0 ORDER BY c.digest
    ON CONFLICT ({timed id_time, }digest) DO UPDATE SET
        state = excluded.state,
        owner = excluded.owner,
        fence = greatest(r.fence + 1, excluded.fence),
        lease_until = excluded.lease_until,
        settled_at = NULL,
        value = NULL,
        attempt = CASE WHEN r.state & 7 = 0 AND (r.expires_at IS NULL OR r.expires_at > excluded.fence)
            THEN r.attempt + 1 ELSE 1 END,
        first_seen = CASE WHEN r.state & 7 = 0 AND (r.expires_at IS NULL OR r.expires_at > excluded.fence)
            THEN coalesce(r.first_seen, r.fence) ELSE nullif(excluded.fence, greatest(r.fence + 1, excluded.fence)) END,
        fingerprint = CASE WHEN r.state & 7 = 0 AND (r.expires_at IS NULL OR r.expires_at > excluded.fence)
            THEN coalesce(nullif(excluded.fingerprint, ''::bytea), r.fingerprint) ELSE excluded.fingerprint END,
        event_type = CASE WHEN r.state & 7 = 0 AND (r.expires_at IS NULL OR r.expires_at > excluded.fence)
            THEN coalesce(excluded.event_type, r.event_type) ELSE excluded.event_type END,
        expires_at = CASE WHEN excluded.state & 24 = 16 AND r.state & 7 = 0
            AND (r.expires_at IS NULL OR r.expires_at > excluded.fence)
            THEN r.expires_at ELSE excluded.expires_at END,
        errors = CASE WHEN r.state & 7 = 0 AND (r.expires_at IS NULL OR r.expires_at > excluded.fence)
            THEN CASE WHEN r.owner IN (''::bytea, excluded.owner) THEN r.errors ELSE {with_lease_end} END END,
        purge_at = excluded.purge_at,
        consumer_id = excluded.consumer_id,
        key = coalesce(excluded.key, r.key)
    WHERE CASE
        WHEN r.state & 7 = 0 AND r.lease_until > excluded.fence THEN false
        WHEN r.state & 15 = 8 AND r.owner <> ''::bytea THEN false
        WHEN r.state & 7 = 4 OR r.expires_at <= excluded.fence THEN excluded.attempt = 1
        WHEN r.state & 7 = 0 THEN r.state & 96 = 0 AND coalesce(excluded.fingerprint = r.fingerprint
            OR substr(excluded.fingerprint, 1, 1) <> substr(r.fingerprint, 1, 1)
            OR r.fingerprint = ''::bytea, true)
        ELSE false
    END
    RETURNING r.digest, r.fence, r.attempt, r.lease_until, r.first_seen{unwaited}
)
SELECT 0::smallint, uuid_send(digest), fence, attempt, lease_until, coalesce(first_seen, fence), NULL::bytea, NULL::bigint FROM won
UNION ALL
SELECT verdict::smallint, uuid_send(digest), fence, CASE WHEN verdict = 3 THEN state & 64 ELSE attempt END,
    CASE verdict WHEN 3 THEN lease_until - now WHEN 6 THEN now - {plain event_time}{timed coalesce(event_time, id_time)} WHEN 7 THEN coalesce(settled_at, lease_until) ELSE settled_at END,
    coalesce(first_seen, fence), CASE WHEN verdict < 3 THEN value END, rest
FROM cur WHERE verdict > 0

-- query: settle
WITH t AS MATERIALIZED {now},
inp AS MATERIALIZED (
    SELECT * FROM unnest(%(digests)b, %(owners)b, %(fences)b, %(ends)b, %(values)b, %(windows)b, %(delays)b,
        %(gives)b, %(errors)b{timed , %(id_times)b}) WITH ORDINALITY
        AS i (digest, owner, fence, goal, value, span, delay, gives, error{timed , id_time}, n)
    ORDER BY digest
),
cur AS MATERIALIZED (
    SELECT i.*, t.now, r.settled_at, r.lease_until,
        CASE
            WHEN r.state IS NULL OR NOT {live} THEN CASE WHEN i.goal < 3 THEN 8 ELSE 0 END
            WHEN r.fence <> i.fence OR r.owner <> i.owner OR i.owner = ''::bytea THEN 0
            WHEN {orphaned} THEN
                CASE i.goal WHEN 3 THEN 2 WHEN 5 THEN 0 ELSE CASE WHEN r.state & 64 <> 0 OR r.state & 48 = 48 THEN 8 ELSE 1 END END
            WHEN r.state & 7 = i.goal THEN CASE WHEN r.value IS NOT DISTINCT FROM i.value THEN 2 ELSE 3 END
            WHEN r.state & 7 > 4 OR (i.goal < 3 AND r.state & 64 <> 0) THEN 8
            WHEN i.goal < 3 AND r.state & 48 = 48 AND r.expires_at IS NULL THEN 8  -- it may have a horizon
            WHEN i.goal < 3 THEN CASE WHEN r.state & 7 IN (0, 3) THEN 1 ELSE 0 END
            WHEN r.state & 7 = 0 THEN 1
            ELSE 0
        END AS verdict
    FROM t CROSS JOIN inp AS i
    LEFT JOIN LATERAL (
        SELECT * FROM {records} AS x WHERE {timed x.id_time = i.id_time AND }x.digest = i.digest
        LIMIT 1 FOR NO KEY UPDATE
    ) AS r ON true
),
put AS (
    UPDATE {records} AS r SET
        state = CASE c.goal WHEN 3 THEN (r.state & ~7) | 3 WHEN 5 THEN r.state ELSE (r.state & ~71) | c.goal END,
        owner = CASE WHEN c.goal = 5 THEN ''::bytea ELSE r.owner END,
        settled_at = CASE WHEN c.goal <> 5 THEN c.now END,
        lease_until = CASE WHEN c.goal = 5 THEN c.now + c.delay END,
        value = CASE WHEN c.goal < 3 THEN c.value END,
        attempt = r.attempt - c.gives,
        errors = CASE WHEN c.error IS NULL THEN {past_errors}
            ELSE {schema}.with_error({past_errors}, r.attempt, c.now, c.error::jsonb) END,
        expires_at = CASE
            WHEN c.goal = 3 THEN NULL
            WHEN c.goal = 5 THEN
                CASE WHEN r.state & 16 <> 0 THEN r.expires_at ELSE r.expires_at + c.now + c.delay - r.lease_until END
            WHEN r.state & 16 <> 0 THEN coalesce(r.expires_at, coalesce(r.first_seen, r.fence) + c.span)
            ELSE c.now + c.span END,
        purge_at = CASE
            WHEN c.goal = 3 THEN NULL
            WHEN c.goal = 5 OR (r.state & 16 <> 0 AND r.expires_at IS NOT NULL) THEN r.purge_at
            WHEN r.purge_at BETWEEN (c.now + c.span + 59999999) / 60000000 AND (c.now + c.span) / 60000000 + 3
                AND r.state & 16 = 0 THEN r.purge_at
            WHEN r.state & 16 <> 0 THEN (coalesce(r.first_seen, r.fence) + c.span + 59999999) / 60000000
            ELSE (c.now + c.span + 59999999) / 60000000 END
    FROM cur AS c WHERE {timed r.id_time = c.id_time AND }r.digest = c.digest AND c.verdict = 1
    RETURNING 1
),
told AS MATERIALIZED (
    SELECT pg_notify('{channel}', string_agg(encode(uuid_send(digest), 'hex'), ''))
    FROM (SELECT digest, row_number() OVER () / 200 AS part FROM cur
        WHERE verdict = 1 AND EXISTS (SELECT FROM {schema}.listeners)) AS changed
    GROUP BY part
)
SELECT n, verdict::smallint, CASE WHEN verdict IN (2, 3) THEN coalesce(settled_at, lease_until) ELSE now END,
    (SELECT count(*) FROM put), (SELECT count(*) FROM told)
FROM cur

-- query: renew
WITH t AS MATERIALIZED {now},
inp AS MATERIALIZED (
    SELECT * FROM unnest(%(digests)b, %(owners)b, %(fences)b, %(leases)b{timed , %(id_times)b}) WITH ORDINALITY
        AS i (digest, owner, fence, lease{timed , id_time}, n)
    ORDER BY digest
),
cur AS MATERIALIZED (
    SELECT i.n, {timed i.id_time, }i.digest, t.now + i.lease AS lease_until
    FROM t CROSS JOIN inp AS i CROSS JOIN LATERAL (
        SELECT * FROM {records} AS x
        WHERE {timed x.id_time = i.id_time AND }x.digest = i.digest AND x.fence = i.fence AND x.owner = i.owner AND i.owner <> ''::bytea
        LIMIT 1 FOR NO KEY UPDATE
    ) AS r
    WHERE r.state & 7 = 0 AND {live} AND NOT {orphaned}
),
put AS (
    UPDATE {records} AS r SET
        expires_at = CASE WHEN r.state & 16 <> 0 THEN r.expires_at
            ELSE r.expires_at + c.lease_until - r.lease_until END,
        lease_until = c.lease_until
    FROM cur AS c WHERE {timed r.id_time = c.id_time AND }r.digest = c.digest
    RETURNING 1
)
SELECT n, lease_until, (SELECT count(*) FROM put) FROM cur

-- query: lookup
WITH t AS MATERIALIZED {now},
inp AS MATERIALIZED (SELECT * FROM unnest(%(digests)b{timed , %(id_times)b}) WITH ORDINALITY AS i (digest{timed , id_time}, n))
SELECT i.n, t.now, m.expires_at, {columns}
FROM t CROSS JOIN inp AS i
LEFT JOIN LATERAL (
    SELECT * FROM {records} AS x WHERE {timed x.id_time = i.id_time AND }x.digest = i.digest LIMIT 1
) AS r ON true
LEFT JOIN LATERAL (SELECT expires_at FROM {schema}.marks AS x
    WHERE r.digest IS NULL AND x.digest = i.digest LIMIT 1) AS m ON true
{beside}

-- query: lock
WITH inp AS MATERIALIZED (
    SELECT * FROM unnest(%(digests)b{timed , %(id_times)b}) AS i (digest{timed , id_time}) ORDER BY digest
)
SELECT count(*) FROM inp AS i
CROSS JOIN LATERAL (
    SELECT 1 FROM {records} AS x WHERE {timed x.id_time = i.id_time AND }x.digest = i.digest LIMIT 1 FOR UPDATE
) AS r

-- query: edge
WITH t AS MATERIALIZED {now}, e AS MATERIALIZED {edge}
SELECT t.now, e.low, e.live FROM t CROSS JOIN e

-- query: reserve
INSERT INTO {records} AS r ({timed id_time, }digest, state, owner, fence, attempt, expires_at, purge_at, consumer_id)
SELECT {timed i.id_time, }i.digest, 4, ''::bytea, 1, 0, 0, 0, i.consumer_id
FROM unnest(%(digests)b, %(consumers)b{timed , %(id_times)b}) AS i (digest, consumer_id{timed , id_time}) ORDER BY i.digest
ON CONFLICT ({timed id_time, }digest) DO UPDATE SET fence = r.fence WHERE false

-- query: write
UPDATE {records} AS r SET
    state = i.state, owner = i.owner, fence = i.fence, first_seen = i.first_seen, attempt = i.attempt,
    lease_until = i.lease_until, settled_at = i.settled_at, expires_at = i.expires_at, purge_at = i.purge_at,
    value = i.value, fingerprint = i.fingerprint, event_type = i.event_type, key = coalesce(i.key, r.key),
    errors = i.errors::jsonb
FROM unnest(%(digests)b, %(states)b, %(owners)b, %(fences)b, %(seens)b, %(attempts)b, %(leases)b, %(settleds)b,
    %(expiries)b, %(purges)b, %(values)b, %(fingerprints)b, %(types)b, %(keys)b, %(errors)b{timed , %(id_times)b})
    AS i (digest, state, owner, fence, first_seen, attempt, lease_until, settled_at, expires_at, purge_at, value,
        fingerprint, event_type, key, errors{timed , id_time})
WHERE {timed r.id_time = i.id_time AND }r.digest = i.digest

-- query: unreserve
DELETE FROM {records} WHERE {timed id_time = ANY (%(id_times)b) AND }digest = ANY (%(digests)b)
    AND state = 4 AND fence = 1

-- query: write_extras
INSERT INTO {schema}.extras (digest, steps, meta, anchor, horizon, id_time)
SELECT * FROM unnest(%(digests)b, %(steps)b, %(metas)b, %(anchors)b, %(horizons)b, %(id_times)b)
ON CONFLICT (digest) DO UPDATE SET steps = excluded.steps, meta = excluded.meta, anchor = excluded.anchor,
    horizon = excluded.horizon

-- query: write_journal
INSERT INTO {schema}.journal (digest, payload)
SELECT * FROM unnest(%(digests)b, %(payloads)b)
ON CONFLICT (digest) DO UPDATE SET payload = excluded.payload

-- query: drop_journal
DELETE FROM {schema}.journal WHERE digest = ANY (%(digests)b)

-- query: drop_extras
DELETE FROM {schema}.extras WHERE digest = ANY (%(digests)b)

-- query: forget_marks
DELETE FROM {schema}.marks WHERE digest = ANY (%(digests)b) RETURNING uuid_send(digest)

-- query: tell
SELECT pg_notify('{channel}', encode(uuid_send(digest), 'hex')) FROM unnest(%(digests)b) AS i (digest)
WHERE EXISTS (SELECT FROM {schema}.listeners)

-- query: consumers
WITH inp AS (SELECT * FROM unnest(%(tenants)b, %(names)b, %(makes)b) AS i (tenant, consumer, making)),
made AS (
    INSERT INTO {schema}.consumers (tenant, consumer)
    SELECT tenant, consumer FROM inp
    WHERE making = 1
        AND NOT EXISTS (SELECT FROM {schema}.consumers AS c WHERE c.tenant = inp.tenant AND c.consumer = inp.consumer)
    ORDER BY tenant COLLATE "C", consumer COLLATE "C"
    ON CONFLICT (tenant, consumer) DO NOTHING
    RETURNING tenant, consumer, id, ids
)
SELECT tenant, consumer, id, ids FROM made
UNION ALL
SELECT c.tenant, c.consumer, c.id, c.ids FROM inp
JOIN {schema}.consumers AS c ON c.tenant = inp.tenant AND c.consumer = inp.consumer

-- query: mark
WITH t AS MATERIALIZED {now},
inp AS MATERIALIZED (
    SELECT i.digest, i.consumer_id, t.now + i.span AS expires_at, t.now
    FROM t CROSS JOIN unnest(%(digests)b, %(consumers)b, %(windows)b) AS i (digest, consumer_id, span)
)
INSERT INTO {schema}.marks AS m (digest, consumer_id, expires_at)
SELECT i.digest, i.consumer_id, i.expires_at FROM inp AS i
LEFT JOIN LATERAL (SELECT expires_at FROM {schema}.marks AS x WHERE x.digest = i.digest LIMIT 1) AS c ON true
WHERE c.expires_at IS NULL OR c.expires_at <= i.now ORDER BY i.digest
ON CONFLICT (digest) DO UPDATE SET expires_at = excluded.expires_at
WHERE m.expires_at <= (SELECT now FROM t)
RETURNING uuid_send(m.digest)

-- query: refresh_marks
-- Marks the keys, and starts the windows of known ones again. 1: new, 0: known, 2: another transaction was faster.
WITH t AS MATERIALIZED {now},
inp AS MATERIALIZED (
    SELECT * FROM unnest(%(digests)b, %(consumers)b, %(windows)b) AS i (digest, consumer_id, span) ORDER BY digest
),
cur AS MATERIALIZED (
    SELECT i.digest, i.consumer_id, t.now + i.span AS till, t.now, m.expires_at
    FROM t CROSS JOIN inp AS i
    LEFT JOIN LATERAL (
        SELECT expires_at FROM {schema}.marks AS x WHERE x.digest = i.digest LIMIT 1 FOR NO KEY UPDATE
    ) AS m ON true
),
put AS (
    UPDATE {schema}.marks AS m SET expires_at = greatest(m.expires_at, c.till)
    FROM cur AS c WHERE m.digest = c.digest AND c.expires_at IS NOT NULL
    RETURNING 1
),
won AS (
    INSERT INTO {schema}.marks (digest, consumer_id, expires_at)
    SELECT c.digest, c.consumer_id, c.till FROM cur AS c WHERE c.expires_at IS NULL ORDER BY c.digest
    ON CONFLICT (digest) DO NOTHING RETURNING digest
)
SELECT uuid_send(c.digest), CASE
        WHEN c.expires_at IS NULL THEN CASE WHEN w.digest IS NULL THEN 2 ELSE 1 END
        WHEN c.expires_at <= c.now THEN 1
        ELSE 0
    END::smallint, c.expires_at IS NOT NULL, (SELECT count(*) FROM put)
FROM cur AS c LEFT JOIN won AS w ON w.digest = c.digest

-- query: mark_in_slot
SELECT uuid_send(m) FROM {schema}.mark_in_slot(%(now)b, %(digests)b, %(consumers)b, %(windows)b, %(times)b) AS m

-- query: next_slot
SELECT {schema}.next_slot(%(now)b)

-- query: lookup_slots
SELECT uuid_send(m.digest), max(m.expires_at) FROM {schema}.timed_marks AS m WHERE m.digest = ANY (%(digests)b)
GROUP BY m.digest

-- query: forget_slots
DELETE FROM {schema}.timed_marks WHERE digest = ANY (%(digests)b) RETURNING uuid_send(digest)

-- query: would_remove_marks
SELECT count(*) FROM {schema}.timed_marks WHERE slot = ANY (%(slots)b)

-- fragment: chosen
r.state & 7 <> 4 AND {live}
    AND (%(after)s::uuid IS NULL
        OR {plain r.digest > %(after)s::uuid}{timed (r.id_time, r.digest) > (%(after_time)b::bigint, %(after)s::uuid)})
    AND (%(tenant)s::text IS NULL OR c.tenant = %(tenant)s::text)
    AND (%(consumer)s::text IS NULL OR c.consumer = %(consumer)s::text)
    AND (%(state)b::int IS NULL OR CASE WHEN {orphaned} THEN 3 ELSE r.state & 7 END = %(state)b::int)
    AND (%(prefix)s::text = '' OR starts_with(r.key, %(prefix)s::text))
    AND (%(seen_before)b::bigint IS NULL OR coalesce(r.first_seen, r.fence) < %(seen_before)b::bigint)
ORDER BY {timed r.id_time, }r.digest LIMIT %(limit)b

-- query: scan
WITH t AS MATERIALIZED {now}
SELECT t.now, r.key, c.tenant, c.consumer, {plain NULL::bigint}{timed r.id_time}, {columns}
FROM t CROSS JOIN {records} AS r
JOIN {schema}.consumers AS c ON c.id = r.consumer_id
{beside}
WHERE {chosen}

-- query: scan_orphaned
WITH t AS MATERIALIZED {now}
SELECT t.now, r.key, c.tenant, c.consumer, NULL::bigint, {columns}
FROM t CROSS JOIN {schema}.journal AS o
CROSS JOIN LATERAL (SELECT * FROM {schema}.records AS x WHERE x.digest = o.digest LIMIT 1) AS r
JOIN {schema}.consumers AS c ON c.id = r.consumer_id
{beside}
WHERE r.state & 71 = 64 AND r.lease_until <= t.now AND NOT {orphaned} AND {chosen}

-- query: purge
WITH t AS MATERIALIZED {now},
due AS MATERIALIZED (
    SELECT r.ctid AS place, r.purge_at,
        greatest(r.expires_at, CASE WHEN r.state & 7 = 0 THEN r.lease_until END) AS gone_at, NOT {live} AS gone
    FROM {schema}.records AS r CROSS JOIN t
    WHERE r.purge_at <= t.now / 60000000 + 3 ORDER BY r.purge_at LIMIT %(examined)b
),
gone AS (
    DELETE FROM {schema}.records WHERE ctid = ANY (ARRAY(
        SELECT r.ctid FROM {schema}.records AS r CROSS JOIN t
        WHERE r.ctid = ANY (ARRAY(SELECT place FROM due WHERE gone ORDER BY purge_at LIMIT %(limit)b))
            AND NOT {live} FOR UPDATE OF r SKIP LOCKED
    )) RETURNING digest, greatest(expires_at, CASE WHEN state & 7 = 0 THEN lease_until END) AS gone_at
),
early AS (
    UPDATE {schema}.records AS u SET purge_at = CASE WHEN u.expires_at IS NULL THEN NULL
        ELSE (greatest(u.expires_at, CASE WHEN u.state & 7 = 0 THEN u.lease_until END) + 59999999) / 60000000 END
    WHERE u.ctid = ANY (ARRAY(
        SELECT r.ctid FROM {schema}.records AS r CROSS JOIN t
        WHERE r.ctid = ANY (ARRAY(SELECT place FROM due WHERE NOT gone AND purge_at <= (SELECT now FROM t) / 60000000))
            AND {live} FOR UPDATE OF r SKIP LOCKED
    )) RETURNING 1
),
notes AS (DELETE FROM {schema}.extras WHERE digest IN (SELECT digest FROM gone) RETURNING 1),
payloads AS (DELETE FROM {schema}.journal WHERE digest IN (SELECT digest FROM gone) RETURNING 1)
SELECT (SELECT now FROM t), (SELECT count(*) FROM gone), (SELECT min(gone_at) FROM gone),
    (SELECT count(*) FROM due WHERE due.gone), (SELECT count(*) FROM early),
    (SELECT count(*) FROM due), (SELECT max(purge_at) FROM due)

-- query: would_remove
SELECT count(*) FROM {schema}.timed_records WHERE id_time < %(upper)b

-- query: would_purge
WITH t AS MATERIALIZED {now}
SELECT (SELECT now FROM t), count(*), min(greatest(r.expires_at, CASE WHEN r.state & 7 = 0 THEN r.lease_until END)),
    (SELECT count(*) FROM {schema}.marks CROSS JOIN t WHERE expires_at <= t.now)
FROM {schema}.records AS r CROSS JOIN t WHERE NOT {live}

-- query: purge_extras
DELETE FROM {schema}.extras WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {schema}.extras WHERE id_time < %(low)b LIMIT %(limit)b FOR UPDATE SKIP LOCKED
))

-- query: elect
SELECT pg_try_advisory_xact_lock(hashtextextended('{channel} cleaner', 0))

-- query: cleaner
SELECT concat_ws(' ', nullif(a.application_name, ''), 'pid ' || a.pid,
    'at ' || coalesce(host(a.client_addr), a.client_hostname, 'the server'))
FROM (SELECT hashtextextended('{channel} cleaner', 0) AS key) AS k
JOIN pg_locks AS l ON l.locktype = 'advisory' AND l.granted
    AND l.classid = ((k.key >> 32) & 4294967295)::oid AND l.objid = (k.key & 4294967295)::oid
JOIN pg_stat_activity AS a ON a.pid = l.pid LIMIT 1

-- query: quickly
SELECT set_config('lock_timeout', '1s', true)

-- query: partition_parents
SELECT CASE mode WHEN 'mark' THEN 'timed_marks' ELSE 'timed_records' END FROM {schema}.consumers
WHERE ids <> '' AND mode IS NOT NULL
UNION
SELECT parent FROM {schema}.partitions

-- query: partitions
-- The last column is for marks: when all of them have expired. NULL: it is the current partition, or a later one.
WITH t AS MATERIALIZED {now}
SELECT t.now, p.name, p.lower, p.upper, c.oid IS NOT NULL, i.inhrelid IS NOT NULL, coalesce(i.inhdetachpending, false),
    CASE WHEN p.lower < (SELECT value::bigint FROM {schema}.meta WHERE name = 'slot')
        THEN greatest(p.upper, (SELECT max(k.until) FROM {schema}.mark_slots AS k WHERE k.slot = p.lower)) END
FROM t LEFT JOIN {schema}.partitions AS p ON p.parent = %(parent)s
LEFT JOIN pg_class AS c ON c.relnamespace = '{schema}'::regnamespace AND c.relname = p.name
LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid
ORDER BY p.lower

-- query: ahead
SELECT min(p.upper) - (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
FROM (SELECT max(upper) AS upper FROM {schema}.partitions GROUP BY parent) AS p

-- query: retention
SELECT name, value FROM {schema}.meta WHERE name IN ('partition_step', 'partition_live', 'low_water', 'low_water_at')

-- query: note
INSERT INTO {schema}.meta (name, value) VALUES (%(name)s, %(value)s)
ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- query: raise_low
WITH raised AS (
    INSERT INTO {schema}.meta AS m (name, value) VALUES ('low_water', %(low)s)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE m.value::bigint < excluded.value::bigint
    RETURNING 1
)
INSERT INTO {schema}.meta (name, value) SELECT 'low_water_at', %(at)s FROM raised
ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- query: note_partition
INSERT INTO {schema}.partitions (name, lower, upper, parent) VALUES (%(name)s, %(lower)b, %(upper)b, %(parent)s)

-- query: drop_partition_note
WITH gone AS (DELETE FROM {schema}.partitions WHERE name = %(name)s RETURNING lower, parent)
DELETE FROM {schema}.mark_slots AS k USING gone WHERE gone.parent = 'timed_marks' AND k.slot = gone.lower

-- query: marks_cursor
SELECT coalesce((SELECT value::bigint FROM {schema}.meta WHERE name = 'marks_purged_to'), 0),
    pg_relation_size('{schema}.marks') / current_setting('block_size')::int

-- query: purge_marks
DELETE FROM {schema}.marks WHERE ctid = ANY (ARRAY(
    SELECT m.ctid FROM {schema}.marks AS m
    WHERE m.ctid >= format('(%%s,0)', %(block)b::bigint)::tid AND m.ctid < format('(%%s,0)', %(until)b::bigint)::tid
        AND m.expires_at <= (SELECT now FROM {now} AS t) LIMIT %(limit)b FOR UPDATE SKIP LOCKED
))
RETURNING 1

-- query: purge_outbox
DELETE FROM {schema}.outbox WHERE id IN (
    SELECT o.id FROM {schema}.outbox AS o, {now} AS t
    WHERE o.gone_at <= t.now AND o.settled_at <= t.now - (SELECT coalesce(max(window_us), 0) FROM {schema}.windows)
    ORDER BY o.gone_at LIMIT %(limit)b FOR UPDATE OF o SKIP LOCKED)
RETURNING 1

-- query: would_purge_outbox
SELECT count(*) FROM {schema}.outbox AS o, {now} AS t
WHERE o.gone_at <= t.now AND o.settled_at <= t.now - (SELECT coalesce(max(window_us), 0) FROM {schema}.windows)

-- query: move_marks_cursor
INSERT INTO {schema}.meta (name, value) VALUES ('marks_purged_to', %(block)s)
ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- query: count
WITH t AS MATERIALIZED {now}
SELECT t.now, {plain 0}{timed 3}, c.tenant, c.consumer, CASE WHEN {free} THEN 7 WHEN {orphaned} THEN 3 ELSE r.state & 7 END AS standing, {live} AS live, count(*),
    min(greatest(r.expires_at, CASE WHEN r.state & 7 = 0 THEN r.lease_until END))
FROM t CROSS JOIN {records} AS r JOIN {schema}.consumers AS c ON c.id = r.consumer_id
WHERE %(tenant)s::text IS NULL OR c.tenant = %(tenant)s::text
GROUP BY t.now, c.tenant, c.consumer, standing, live

-- query: count_rest
WITH t AS MATERIALIZED {now}
SELECT t.now, 1, c.tenant, c.consumer, 1, true, count(*), NULL
FROM t CROSS JOIN (
    SELECT consumer_id, expires_at FROM {schema}.marks UNION ALL SELECT consumer_id, expires_at FROM {schema}.timed_marks
) AS m
JOIN {schema}.consumers AS c ON c.id = m.consumer_id
WHERE m.expires_at > t.now AND (%(tenant)s::text IS NULL OR c.tenant = %(tenant)s::text)
GROUP BY t.now, c.tenant, c.consumer
UNION ALL
SELECT t.now, 2, '', '', 0, true, 0, (SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
    WHERE relnamespace = '{schema}'::regnamespace AND relkind = 'r')
FROM t

-- query: read_windows
SELECT tenant, consumer, event_type, window_us FROM {schema}.windows

-- query: read_modes
SELECT tenant, consumer, mode, ids FROM {schema}.consumers WHERE mode IS NOT NULL

-- query: set_window
INSERT INTO {schema}.windows (tenant, consumer, event_type, window_us)
VALUES (%(tenant)s, %(consumer)s, %(event_type)s, %(window)b)
ON CONFLICT (tenant, consumer, event_type) DO UPDATE SET window_us = excluded.window_us

-- query: drop_window
DELETE FROM {schema}.windows WHERE tenant = %(tenant)s AND consumer = %(consumer)s AND event_type = %(event_type)s

-- query: move_expiries
WITH t AS MATERIALIZED {now},
chosen AS MATERIALIZED (
    SELECT {timed r.id_time, }r.digest FROM {records} AS r CROSS JOIN t
    WHERE r.consumer_id = (SELECT id FROM {schema}.consumers WHERE tenant = %(tenant)s AND consumer = %(consumer)s)
        AND r.state & 7 IN (1, 2) AND {live}
        AND %(event_type)s::text = coalesce((SELECT w.event_type FROM {schema}.windows AS w  -- the window that applies to it
            WHERE w.tenant = %(tenant)s AND w.consumer = %(consumer)s AND w.event_type = r.event_type), '')
        AND NOT EXISTS (SELECT FROM {schema}.extras AS x  -- the window of its key counts
            WHERE r.state & 32 <> 0 AND x.digest = r.digest AND x.anchor IS NOT NULL)
    ORDER BY r.digest FOR UPDATE OF r
)
UPDATE {records} AS r SET
    expires_at = CASE WHEN r.state & 16 <> 0 THEN coalesce(r.first_seen, r.fence) ELSE coalesce(r.settled_at, r.fence) END
        + %(window)b::bigint,
    purge_at = (CASE WHEN r.state & 16 <> 0 THEN coalesce(r.first_seen, r.fence) ELSE coalesce(r.settled_at, r.fence) END
        + %(window)b::bigint) / 60000000 + 1
FROM chosen WHERE {timed chosen.id_time = r.id_time AND }chosen.digest = r.digest AND r.state & 7 IN (1, 2)

-- query: admit
WITH made AS (
    INSERT INTO {schema}.consumers AS c (tenant, consumer, mode, ids)
    SELECT %(tenant)s, %(consumer)s, %(mode)s, %(ids)s
    WHERE NOT EXISTS (SELECT FROM {schema}.consumers
        WHERE tenant = %(tenant)s AND consumer = %(consumer)s AND mode IS NOT NULL)
    ON CONFLICT (tenant, consumer) DO UPDATE SET mode = coalesce(c.mode, excluded.mode)
    RETURNING mode, ids
)
SELECT mode, ids FROM made
UNION ALL
SELECT mode, ids FROM {schema}.consumers WHERE tenant = %(tenant)s AND consumer = %(consumer)s AND mode IS NOT NULL

-- query: lock_mode
INSERT INTO {schema}.consumers AS c (tenant, consumer) VALUES (%(tenant)s, %(consumer)s)
ON CONFLICT (tenant, consumer) DO UPDATE SET mode = c.mode RETURNING id, ids, mode

-- query: unfinished
WITH t AS MATERIALIZED {now}
SELECT count(*) FROM {records} AS r CROSS JOIN t
WHERE r.consumer_id = %(consumer)b AND (r.state & 7 IN (0, 3)) AND NOT {free} AND {live}

-- query: put_mode
UPDATE {schema}.consumers SET mode = %(mode)s WHERE id = %(consumer)b

-- query: server
SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), current_setting('transaction_read_only'),
    current_setting('server_encoding'), current_setting('synchronous_commit'), current_setting('fsync'),
    current_setting('full_page_writes'), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- query: has_schema
SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = '{name}'), EXISTS (SELECT FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = '{name}' AND c.relname = 'meta')

-- query: version
SELECT value::int FROM {schema}.meta WHERE name = 'schema_version'

-- query: migration_lock
SELECT pg_advisory_xact_lock(hashtextextended('{channel}', 0))

-- query: any_plan
SELECT set_config('enable_hashjoin', 'on', true), set_config('enable_mergejoin', 'on', true),
    set_config('enable_seqscan', 'on', true)

-- query: lock_listeners
SET LOCAL lock_timeout = '100ms';
LOCK TABLE {schema}.listeners IN ACCESS EXCLUSIVE MODE

-- query: listen
WITH gone AS (
    DELETE FROM {schema}.listeners AS l WHERE NOT EXISTS (
        SELECT FROM pg_stat_activity AS a WHERE a.pid = l.pid
            AND coalesce(a.backend_start <= l.since, true))  -- a role may not be allowed to see when other sessions started
)
INSERT INTO {schema}.listeners (pid, since) VALUES (pg_backend_pid(), clock_timestamp())
ON CONFLICT (pid) DO UPDATE SET since = excluded.since

-- query: unlisten
DELETE FROM {schema}.listeners WHERE pid = pg_backend_pid()

-- query: identity
SELECT {schema}.identity()

-- query: patience
SELECT set_config('lock_timeout', %(wait_ms)s, true)

-- query: await_key
INSERT INTO {records} AS r ({timed id_time, }digest, state, owner, fence, attempt, expires_at, purge_at, consumer_id)
VALUES ({timed %(id_time)b, }%(digest)s::uuid, 4, ''::bytea, 1, 0, 0, 0, 0)
ON CONFLICT ({timed id_time, }digest) DO UPDATE SET fence = r.fence WHERE false

-- query: marked_by
SELECT owner FROM {records} WHERE {timed id_time = %(id_time)b AND }digest = %(digest)s::uuid AND state & 7 = 1
