-- The errors of a record's last attempts, for operators. Most records have none, and are not rewritten.

ALTER TABLE semel_records ADD COLUMN errors BLOB;

UPDATE semel_meta SET value = 3 WHERE name = 'schema_version';
