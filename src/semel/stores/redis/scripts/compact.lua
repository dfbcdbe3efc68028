-- Mark each id in sets of small integers: a few bytes per mark, remembered for one to two windows.
--
-- KEYS[2]  the hash with, for each consumer, its number of sets, then the windows it was used with: 8192/1024,60000000
--          After a slash: earlier, smaller numbers of sets. When sets become too full for the compact form, the number
--          grows. Marks stay where they are, and are also looked up there. A plus in a set's name for each growth.
-- KEYS[i]  from 3 on: the prefix of a set's name
-- ARGV[7]  the consumer's tag      ARGV[8]  the number of sets that the client knows
-- ARGV[9]  the window              ARGV[10] M mark, R mark and start the windows of known ones again, L look, F forget
-- ARGV[i+8] the id for KEYS[i]
-- A generation is as long as the window and has its own sets. A mark goes into the current generation and is looked up
-- in that and in the one before, and in the sets of all other windows that the consumer was used with.
--
-- 1 new, or found (expiry)  0 not  B the number of sets differs  W too many windows  O no memory  X corrupt

local WINDOWS_MAX = 16
local FULL = 352 -- members of a set: up to 512 take eight bytes each, and more of them ten times as much
local GROWTH, BINS_MAX = 8, 16777216
local floor = math.floor
local tag, bins, window, op = ARGV[7], ARGV[8], tonumber(ARGV[9]), ARGV[10]
local refreshing = op == 'R'
if refreshing then op = 'M' end

local sizes, windows, mine = {}, {}, false
local shape = call('HGET', KEYS[2], tag)
if shape then
  local head, rest = string.match(shape, '^([%d/]+)(.*)$')
  for text in string.gmatch(head, '%d+') do sizes[#sizes + 1] = tonumber(text) end
  for text in string.gmatch(rest, '%d+') do windows[#windows + 1] = tonumber(text) end
  if number(sizes[1]) ~= bins then
    details[3], details[4] = 'B', number(sizes[1])
    return details
  end
  for _, each in ipairs(windows) do mine = mine or each == window end
else
  shape, sizes = bins, {tonumber(bins)}
end
if op == 'M' and not mine and window > 0 then
  if #windows >= WINDOWS_MAX then
    details[3] = 'W'
    return details
  end
  shape = shape .. ',' .. number(window)
  local done = pcall_('HSET', KEYS[2], tag, shape)
  if type(done) == 'table' then
    if not string.find(done.err, 'OOM', 1, true) then return redis.error_reply(done.err) end
    details[3] = 'O'
    return details
  end
end

-- The sets in which a mark may be, one name per item, and their expiry. A generation without any set, as before the
-- first window has passed, is skipped.
local places, expiries = {}, {}
local function names(length, n, level)
  local size = level > 1 and sizes[level]
  local ending = string.rep('+', #sizes - level) .. ':' .. number(length) .. '.' .. number(n)
  local found = {}
  for i = 3, #KEYS do
    local key = KEYS[i]
    if size then -- the set that the digest had among fewer sets
      local a, b, c = byte(key, -3, -1)
      local place = (a * 65536 + b * 256 + c) % size
      key = sub(key, 1, -4) .. string.char(floor(place / 65536), floor(place / 256) % 256, place % 256)
    end
    found[i - 2] = key .. ending
  end
  return found
end
local function generation(length, n, level)
  local found = names(length, n, level)
  if call('EXISTS', unpack(found)) > 0 then
    places[#places + 1] = found
    expiries[#expiries + 1] = number((n + 2) * length)
  end
end
for _, each in ipairs(windows) do
  local n = floor(now / each)
  for level = 1, #sizes do
    generation(each, n - 1, level)
    if each ~= window or op ~= 'M' or level > 1 then generation(each, n, level) end
  end
end

local running, till, begun
if window > 0 then
  local n = floor(now / window)
  running, till = names(window, n, 1), milliseconds((n + 2) * window)
  begun = call('EXISTS', unpack(running)) == #running -- then each of them already has an expiry
end

local function find(at, id)
  for place = 1, #places do
    local there = pcall_('SISMEMBER', places[place][at], id)
    if there == 1 then return place end
    if there ~= 0 then return nil end
  end
  return 0
end

for i = 3, #KEYS do
  local item, id = i - 2, ARGV[i + 8]
  local place = find(item, id)
  if not place then
    out[item] = 'X'
  elseif op == 'L' then
    if place > 0 then
      out[item] = '1'
      details[#details + 1] = expiries[place]
    else
      out[item] = '0'
    end
  elseif op == 'F' then
    out[item] = place > 0 and '1' or '0'
    for each = 1, #places do call('SREM', places[each][item], id) end
  elseif place > 0 and not (refreshing and running) then
    out[item] = '0'
  elseif not running then
    out[item] = '1'
  else
    local key = running[item]
    local added = pcall_('SADD', key, id)
    if added == 1 then
      out[item] = place > 0 and '0' or '1' -- known marks are copied into the current generation
      if not begun and call('SCARD', key) == 1 then call('PEXPIRE', key, till) end
    elseif added == 0 or pcall_('SISMEMBER', key, id) == 1 then -- at the memory limit, known marks still answer
      out[item] = '0'
    else
      denied(i - 1, added)
    end
  end
end

if op == 'M' and running and sizes[1] * GROWTH <= BINS_MAX then
  local members = pcall_('SCARD', running[1])
  if type(members) == 'number' and members > FULL then
    pcall_('HSET', KEYS[2], tag, number(sizes[1] * GROWTH) .. '/' .. shape) -- without memory, the next call tries again
  end
end

return finish()
