-- The errors of a record's last attempts, for operators: an array of objects with attempt, kind, message, traceback,
-- worker and at (microseconds since 1970), the oldest first. Most records have none. Existing rows are not rewritten.

ALTER TABLE {schema}.records ADD COLUMN errors jsonb;
ALTER TABLE {schema}.timed_records ADD COLUMN errors jsonb;

-- Adds the error of one more attempt, and drops the oldest of more than five.
CREATE FUNCTION {schema}.with_error(errors jsonb, attempt integer, at bigint, error jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog AS $$
    SELECT CASE WHEN jsonb_array_length(errors) >= 5 THEN errors - 0 ELSE coalesce(errors, '[]') END
        || jsonb_build_array(error || jsonb_build_object('attempt', attempt, 'at', at))
$$;

UPDATE {schema}.meta SET value = '6' WHERE name = 'schema_version';
