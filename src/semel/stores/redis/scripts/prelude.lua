-- The beginning of every script: the time, the epoch, and how to read and write a record.
--
-- KEYS[1]  the epoch of this bucket (of the whole database, on a single server)
-- KEYS[i]  from 2 on: a record each
-- ARGV[1]  the time in microseconds, empty: use the server's clock
-- ARGV[2]  the epoch that the client knows, empty: none yet
-- ARGV[3]  the epoch to write if there is none
-- ARGV[4]  's': stop if the epoch differs; 'b': bare, only the record's key may be touched
-- ARGV[5]  the channel for ended records, empty: none; after a '?': publish only if this server has subscribers
-- ARGV[6]  the most bytes of stored records in one reply
-- ARGV[7]  the fields that all items share
-- ARGV[i+6] the item for KEYS[i]
--
-- A record is a header of 26 bytes, then its owner and its other parts, in this order:
--   B version, B state + flags, B more flags, H attempt, I7 expires_at, I7 lease_until or settled_at, I7 fence
--   B+ owner | I7 first_seen | I7 anchor, I7 horizon | H+ name | H+ event type | H+ fingerprint | I4+ meta | I4+ steps
--   | I4+ errors | I4+ journal | I4+ value
-- The usual value, null, is only a flag. Errors are H attempt, I7 at, I4+ error each: what the client packed, or a
-- zero byte and the beginning of the owner whose lease ended.
-- The reply is {now, epoch, one letter per item, details of some letters...}; '+': not carried out, send it again.

local call, pcall_, byte, sub, format = redis.call, redis.pcall, string.byte, string.sub, string.format
local spack, sunpack = struct.pack, struct.unpack

local VERSION = 1
local HEADER, HEADER_BYTES = '>BBBHI7I7I7', 26
local FOREVER = 9007199254740991
local ATTEMPT_MAX = 65535
local SPARE_MS = 1000 -- records stay a little longer than their expiry, so that fences keep rising with short windows
local CLAIMED, DONE, FAILED, UNKNOWN, FORGOTTEN = 0, 1, 2, 3, 4
local QUARANTINE, SLIDING, SEEN, VALUE, JOURNAL = 8, 16, 32, 64, 128
local NAME, TYPE, PRINT, META, STEPS, ANCHOR, NOTHING, ERRORS = 1, 2, 4, 8, 16, 32, 64, 128
local ERRORS_MAX, ERROR_HEAD, ERROR_HEAD_BYTES = 5, '>HI7I4', 13

local now
if ARGV[1] == '' then
  local t = call('TIME')
  now = t[1] * 1000000 + t[2]
else
  now = tonumber(ARGV[1])
end

local bare = ARGV[4] == 'b'
local epoch = ARGV[2]
if not bare then
  epoch = call('GET', KEYS[1])
  if not epoch then
    epoch = ARGV[3]
    if ARGV[2] == '' or ARGV[4] ~= 's' then
      local armed = pcall_('SET', KEYS[1], epoch)
      if armed.err then epoch = ARGV[2] end
    end
  end
  if ARGV[2] ~= '' and epoch ~= ARGV[2] and ARGV[4] == 's' then
    return {now, epoch}
  end
end

-- The channel for ended records.
local channel = ARGV[5] ~= '' and ARGV[5]
if channel and byte(channel) == 63 then
  channel = sub(channel, 2)
  local listening = pcall_('PUBSUB', 'NUMSUB', channel)
  if listening[2] == 0 then channel = false end
end

local out, details, spent, room = {}, {now, epoch, ''}, 0, tonumber(ARGV[6])
local ended = {}
local failure

local function has(flags, flag)
  return flags % (flag + flag) >= flag
end

local function number(n)
  return format('%.0f', n)
end

-- Answer item i with a letter and its detail.
local function say(i, letter, detail)
  out[i - 1] = letter
  details[#details + 1] = detail
  spent = spent + #detail
end

local function milliseconds(till)
  return format('%.0f', math.max(0, math.ceil((till - now) / 1000)) + SPARE_MS)
end

local function put(key, raw, till)
  if till >= FOREVER then
    return pcall_('SET', key, raw)
  end
  return pcall_('SET', key, raw, 'PX', milliseconds(till))
end

-- The key of the bucket's list of journaled claims, sorted by the end of their lease.
local function journals(key)
  return sub(key, 1, -18) .. 'journal'
end

local function sized(format_, text)
  return spack(format_, #text) .. text
end

-- Decode a record. Raises an error if it is not one.
local function open(raw)
  local r = {}
  local version, st, fl
  version, st, fl, r.attempt, r.expires, r.at, r.fence = sunpack(HEADER, raw)
  r.state = st % 8
  if version ~= VERSION or r.state > FORGOTTEN then error('foreign') end
  r.quarantine, r.sliding = has(st, QUARANTINE), has(st, SLIDING)
  local at = HEADER_BYTES + 1
  local function take(format_, width)
    local from = at + width
    local length = sunpack(format_, raw, at)
    at = from + length
    if at > #raw + 1 then error('cut short') end
    return sub(raw, from, at - 1)
  end
  r.owner = take('>B', 1)
  r.seen = r.fence
  if has(st, SEEN) then
    r.seen = sunpack('>I7', raw, at)
    at = at + 7
  end
  if has(fl, ANCHOR) then
    r.anchor, r.horizon = sunpack('>I7I7', raw, at)
    at = at + 14
  end
  if has(fl, NAME) then r.name = take('>H', 2) end
  if has(fl, TYPE) then r.type = take('>H', 2) end
  if has(fl, PRINT) then r.print = take('>H', 2) end
  if has(fl, META) then r.meta = take('>I4', 4) end
  if has(fl, STEPS) then r.steps = take('>I4', 4) end
  if has(fl, ERRORS) then r.errors = take('>I4', 4) end
  if has(st, JOURNAL) then r.journal = take('>I4', 4) end
  if has(st, VALUE) then r.value = take('>I4', 4) end
  r.nothing = has(fl, NOTHING)
  if at ~= #raw + 1 then error('too long') end
  return r
end

-- Encode a record.
local function close(r)
  local st, fl = r.state, 0
  local parts = {'', sized('>B', r.owner)}
  local function add(format_, text)
    parts[#parts + 1] = sized(format_, text)
  end
  if r.quarantine then st = st + QUARANTINE end
  if r.sliding then st = st + SLIDING end
  if r.seen ~= r.fence then
    st = st + SEEN
    parts[3] = spack('>I7', r.seen)
  end
  if r.anchor then
    fl = fl + ANCHOR
    parts[#parts + 1] = spack('>I7I7', r.anchor, r.horizon)
  end
  if r.name then fl = fl + NAME; add('>H', r.name) end
  if r.type then fl = fl + TYPE; add('>H', r.type) end
  if r.print then fl = fl + PRINT; add('>H', r.print) end
  if r.meta then fl = fl + META; add('>I4', r.meta) end
  if r.steps then fl = fl + STEPS; add('>I4', r.steps) end
  if r.errors then fl = fl + ERRORS; add('>I4', r.errors) end
  if r.journal then st = st + JOURNAL; add('>I4', r.journal) end
  if r.value then st = st + VALUE; add('>I4', r.value) end
  if r.nothing then fl = fl + NOTHING end
  parts[1] = spack(HEADER, VERSION, st, fl, math.min(r.attempt, ATTEMPT_MAX), r.expires, r.at, r.fence)
  return table.concat(parts)
end

-- The errors with one more, without the oldest if there are too many.
local function with_error(errors, attempt, at, error_)
  errors = (errors or '') .. spack(ERROR_HEAD, math.min(attempt, ATTEMPT_MAX), at, #error_) .. error_
  local count, place, second = 0, 1, 1
  while place <= #errors do
    count = count + 1
    local _, _, length = sunpack(ERROR_HEAD, errors, place)
    place = place + ERROR_HEAD_BYTES + length
    if count == 1 then second = place end
  end
  return count > ERRORS_MAX and sub(errors, second) or errors
end

-- The errors with that of an attempt whose lease ended: of its worker only the id is known.
local function with_lease_end(r)
  return with_error(r.errors, r.attempt, r.at, '\0' .. sub(r.owner, 1, 4))
end

-- The effective record at this time; nil: it no longer counts. Sets `changed` if its state differs from the stored one.
local function standing(r)
  if r.state ~= CLAIMED then
    return r.expires > now and r or nil
  end
  if r.at > now then return r end
  if r.quarantine and r.owner ~= '' then
    r.errors = with_lease_end(r)
    r.state, r.expires, r.changed = UNKNOWN, FOREVER, true
    return r
  end
  return r.expires > now and r or nil
end

local function gone_at(r)
  if r.state == CLAIMED and r.at > r.expires then return r.at end
  return r.expires
end

-- A write was refused. Lack of memory is this item's answer; any other error ends the script.
local function denied(i, reply)
  out[i - 1] = 'O'
  if not string.find(reply.err, 'OOM', 1, true) then
    failure = reply.err
  end
end

-- Note the record for the waiters: they may try again.
local function has_ended(key)
  if channel then ended[#ended + 1] = sub(key, -16) end
end

-- Write a record and update the list of journaled claims. `had`: the record was on that list.
local function store(i, key, r, had)
  local done = put(key, close(r), gone_at(r))
  if done.err then
    denied(i, done)
    return false
  end
  if r.journal and r.state == CLAIMED then
    call('ZADD', journals(key), number(r.at), sub(key, -16))
  elseif had then
    call('ZREM', journals(key), sub(key, -16))
  end
  return true
end

-- Move the lease, and the expiry by as much, except if a decision or the first claim sets the expiry.
local function move(r, lease_until)
  if not r.sliding and r.expires < FOREVER then
    r.expires = r.expires + lease_until - r.at
  end
  r.at = lease_until
end

local function next_fence(fence)
  if fence and fence >= now then return fence + 1 end
  return now
end

local function finish()
  if failure then
    return redis.error_reply(failure)
  end
  if #ended > 0 then
    call('PUBLISH', channel, table.concat(ended))
  end
  details[3] = table.concat(out)
  return details
end
