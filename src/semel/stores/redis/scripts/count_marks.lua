-- Count live marks.
--
-- KEYS     marks
-- ARGV[1]  the time in microseconds
-- ARGV[2]  how many bytes at the end of a key are its digest
-- ARGV[3]  with how many of them every key of one consumer begins
--
-- The reply is {those bytes, how many, ...}. An empty mark, written by a plain command, counts until the server removes it.

local sub = string.sub
local now, digest, tag = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local live, names = {}, {}

for i = 1, #KEYS do
  local expires = redis.pcall('GET', KEYS[i])
  if type(expires) == 'table' and not string.find(expires.err, 'WRONGTYPE', 1, true) then
    return expires -- unread is not absent
  end
  if type(expires) == 'string' and (expires == '' or (tonumber(expires) or 0) > now) then
    local name = sub(KEYS[i], -digest, tag - digest - 1)
    if not live[name] then
      live[name] = 0
      names[#names + 1] = name
    end
    live[name] = live[name] + 1
  end
end

local counts = {}
for i = 1, #names do
  counts[#counts + 1] = names[i]
  counts[#counts + 1] = live[names[i]]
end
return counts
