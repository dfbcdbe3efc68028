-- One plain claim. It decides only whether there is a record; without one it writes the claim.
--
-- KEYS[1]  the epoch of the database
-- KEYS[2]  the record
-- ARGV[1]  the time in microseconds, empty: use the server's clock
-- ARGV[2]  the epoch that the client knows
-- ARGV[3]  the record's first five bytes, see `prelude.lua`: version, flags, more flags, attempt
-- ARGV[4]  the lease and the window together
-- ARGV[5]  the lease
-- ARGV[6]  the record's bytes after the header
-- ARGV[7]  how long the server keeps the record, in milliseconds
--
-- The reply is the time: granted. {the time, the record}: the client decides. false: another epoch, nothing is done.

local call = redis.call

if call('GET', KEYS[1]) ~= ARGV[2] then return false end

local now
if ARGV[1] == '' then
  local t = call('TIME')
  now = t[1] * 1000000 + t[2]
else
  now = tonumber(ARGV[1])
end

local raw = call('GET', KEYS[2])
if raw then return {now, raw} end

call(
  'SET', KEYS[2],
  ARGV[3] .. struct.pack('>I7I7I7', now + ARGV[4], now + ARGV[5], now) .. ARGV[6],
  'PX', ARGV[7]
)
return now
