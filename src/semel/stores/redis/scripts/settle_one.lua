-- Complete or fail one claim, if its record is still what the claim wrote.
--
-- KEYS[1]  the epoch of the database
-- KEYS[2]  the record
-- ARGV[1]  the time in microseconds, empty: use the server's clock
-- ARGV[2]  the epoch that the client knows
-- ARGV[3]  the record as the claim wrote it
-- ARGV[4]  when that record expires
-- ARGV[5]  the new record's first five bytes, see `prelude.lua`: version, flags, more flags, attempt
-- ARGV[6]  the window
-- ARGV[7]  the value with its length, empty: none
-- ARGV[8]  how long the server keeps the record, in milliseconds
-- ARGV[9]  the channel for ended records
--
-- The reply is the time: settled. false: something differs, nothing is done.

local call = redis.call
local REST_AT = 20 -- the fence, the owner and the other parts of the record begin here, and stay

if call('GET', KEYS[1]) ~= ARGV[2] or call('GET', KEYS[2]) ~= ARGV[3] then return false end

local now
if ARGV[1] == '' then
  local t = call('TIME')
  now = t[1] * 1000000 + t[2]
else
  now = tonumber(ARGV[1])
end
if now >= tonumber(ARGV[4]) then return false end

-- First the message, then the record: a server that refuses to publish must not have changed the record.
-- Nobody sees the one without the other.
local listening = redis.pcall('PUBSUB', 'NUMSUB', ARGV[9])
if listening[2] ~= 0 then call('PUBLISH', ARGV[9], string.sub(KEYS[2], -16)) end

call(
  'SET', KEYS[2],
  ARGV[5] .. struct.pack('>I7I7', now + ARGV[6], now) .. string.sub(ARGV[3], REST_AT) .. ARGV[7],
  'PX', ARGV[8]
)
return now
