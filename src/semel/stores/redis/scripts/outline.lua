-- Look at records without sending the finished ones, which are nearly all, to the client.
--
-- KEYS     records
-- ARGV[1]  the time in microseconds
-- ARGV[2]  how many bytes of a record are read
-- ARGV[3]  tenant and consumer whose finished records are wanted too, empty: none
--
-- The reply is {{tenant and consumer, how many are done, ...}, {position, first bytes, ...}}: the second list has all
-- records that are not done, and those that are wanted; the client decides what they are. `prelude.lua` describes a
-- record.

local byte, sub = string.byte, string.sub
local now, till = tonumber(ARGV[1]), ARGV[2] - 1
local OWNER = 27
local done, names, others = {}, {}, {}

-- The tenant and the consumer of a finished record, as they are stored: two lengths and two texts.
local function scope_of(raw)
  local flags, more, at = byte(raw, 2), byte(raw, 3), OWNER + 1 + byte(raw, OWNER)
  if flags % 64 >= 32 then at = at + 7 end -- first seen
  if more % 64 >= 32 then at = at + 14 end -- anchor, horizon
  if more % 2 == 0 then return '\0\0\0\0' end -- the name was not kept
  local lengths = byte(raw, at + 2) * 256 + byte(raw, at + 3) + byte(raw, at + 4) * 256 + byte(raw, at + 5)
  return sub(raw, at + 2, at + 5 + lengths)
end

for i = 1, #KEYS do
  local raw = redis.pcall('GETRANGE', KEYS[i], 0, till)
  if type(raw) == 'table' then
    if not string.find(raw.err, 'WRONGTYPE', 1, true) then return raw end -- unread is not absent
  elseif raw ~= '' then
    if #raw > OWNER and byte(raw, 1) == 1 and byte(raw, 2) % 8 == 1 then
      if struct.unpack('>I7', raw, 6) > now then
        local known, scope = pcall(scope_of, raw)
        if known and scope == ARGV[3] then
          others[#others + 1] = i
          others[#others + 1] = raw
        elseif known then
          if not done[scope] then
            done[scope] = 0
            names[#names + 1] = scope
          end
          done[scope] = done[scope] + 1
        end
      end
    else
      others[#others + 1] = i
      others[#others + 1] = raw
    end
  end
end

local counts = {}
for i = 1, #names do
  counts[#counts + 1] = names[i]
  counts[#counts + 1] = done[names[i]]
end
return {counts, others}
