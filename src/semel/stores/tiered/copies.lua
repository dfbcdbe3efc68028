-- Copies of committed answers of the truth: look, put, invalidate, clear. One script, so that each is one round trip.
--
-- KEYS: the epoch, the counts, then the keys of the copies.
-- ARGV: the operation, the time (only in tests), a fresh token, the longest life in microseconds, the most bytes in a
-- reply, the counts (`name number name number`), then one argument for each key.
-- Reply: the time, the epoch, then for each key: the copy or nothing (look), 1 or 0 (put).
--
-- The epoch is life, age and token. Life: this server process as this master. A restart or a failover begins another
-- life, and the copies of the former are void: the lost writes may include that one of them was forgotten. Age: changed
-- by clear, and by every loss of this key (a flush, an eviction). Token: changed by invalidate, so that a copy that was
-- already pending is refused even if its tombstone has been lost.

local what, fresh, longest = ARGV[1], ARGV[3], tonumber(ARGV[4])
local find, sub = string.find, string.sub
local call, try = redis.call, redis.pcall
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
if ARGV[2] ~= '' then now = tonumber(ARGV[2]) end

local role = call('INFO', 'replication')
if not find(role, 'role:master', 1, true) then
  return redis.error_reply('READONLY a replica does not know what its master has forgotten')
end
local _, _, run = find(call('INFO', 'server'), 'run_id:(%x+)')
local _, _, line = find(role, 'master_replid:(%x+)')
local life = sub(run, 1, 8) .. sub(line or run, 1, 8)

local held = try('GET', KEYS[1])
if type(held) ~= 'string' or #held ~= 16 or what == 'clear' then
  held = fresh
  call('DEL', KEYS[1]) -- if there is no memory for a new epoch, none is safe too: no copy can be written
  try('SET', KEYS[1], held)
elseif what == 'invalidate' then
  held = sub(held, 1, 8) .. sub(fresh, 9)
  if type(try('SET', KEYS[1], held)) == 'table' and try('GET', KEYS[1]) ~= held then
    call('DEL', KEYS[1])
  end
end
local epoch, sort = life .. held, life .. sub(held, 1, 8)

for name, number in string.gmatch(ARGV[6], '(%S+) (%d+)') do
  try('HINCRBY', KEYS[2], name, number)
end

-- A stored copy: its sort (life and age), its expiry, its fence, and the client's bytes; a tombstone has no such bytes.
local FORM, HEAD = '>c24dd', 40
local function read(raw)
  if type(raw) ~= 'string' or #raw < HEAD then return nil end
  local theirs, over, fence = struct.unpack(FORM, raw)
  if theirs ~= sort or over <= now then return nil end
  return fence, sub(raw, HEAD + 1)
end

local out = { string.format('%.0f', now), epoch }
if what == 'look' then
  local room = tonumber(ARGV[5])
  for i = 3, #KEYS do
    local fence, body = read(try('GET', KEYS[i]))
    out[i] = false
    if fence and body ~= '' and room > 0 then
      room = room - #body
      out[i] = body
    end
  end
elseif what == 'put' then
  for i = 3, #KEYS do
    local theirs, over, fence = struct.unpack('>c32dd', ARGV[i + 4])
    over = math.min(over, now + longest)
    out[i] = 0
    if theirs == epoch and over > now then
      local known = read(try('GET', KEYS[i]))
      if not known or known <= fence then
        local raw = struct.pack(FORM, sort, over, fence) .. sub(ARGV[i + 4], 49)
        local written = try('SET', KEYS[i], raw, 'PX', math.ceil((over - now) / 1000))
        out[i] = written.ok and 1 or 0
      end
    end
  end
elseif what == 'invalidate' then
  for i = 3, #KEYS do
    call('DEL', KEYS[i])
    local raw = struct.pack(FORM, sort, now + longest, tonumber(ARGV[i + 4]))
    try('SET', KEYS[i], raw, 'PX', math.ceil(longest / 1000))
  end
end
return out
