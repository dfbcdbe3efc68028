-- Marks in three tables of one form: new marks go into a small one, and move down in ranges of digests. A batch of
-- random digests then writes few pages, however many marks the last table holds. If a digest is in two tables, the
-- upper row is the newer one, and the lower one has expired.

PRAGMA legacy_alter_table = ON;     -- another application's views need not be valid for this
ALTER TABLE semel_marks RENAME TO semel_marks_2;
PRAGMA legacy_alter_table = OFF;

CREATE TABLE semel_marks_0 (
    digest BLOB PRIMARY KEY,
    consumer_id INTEGER NOT NULL,
    expires_at INTEGER NOT NULL         -- since 2029
) WITHOUT ROWID;

CREATE TABLE semel_marks_1 (
    digest BLOB PRIMARY KEY,
    consumer_id INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) WITHOUT ROWID;

-- A process that was started before this migration cannot write to a view: it fails, and misses no mark.
CREATE VIEW semel_marks AS
SELECT digest, consumer_id, expires_at FROM semel_marks_0
UNION ALL
SELECT digest, consumer_id, expires_at FROM semel_marks_1
UNION ALL
SELECT digest, consumer_id, expires_at FROM semel_marks_2;

DELETE FROM semel_meta WHERE name = 'marks_purged_to';
UPDATE semel_meta SET value = 4 WHERE name = 'schema_version';
