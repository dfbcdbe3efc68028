-- Claim each record, or answer with the state that a duplicate needs.
--
-- Shared fields: B state flags, B more flags, B late, d lease, d window, d event time. Item: the part after the header.
-- Late: 0 never, 1 by the event time, 2 by the anchor of each item; then `apart` takes the place of the event time.
-- Plus 4: the windows of settled records start again.
-- F granted, all new  G granted (record)  K known (record)  B busy (rest)  J busy, journaled (rest)
-- M mismatch  L late (age)  U unknown (since)  O no memory  X corrupt  T try again

local st, fl, late, lease, window, event_time = sunpack('>BBBddd', ARGV[7])
local refreshing = late >= 4
if refreshing then late = late - 4 end
local AHEAD_US = 300000000
local anchored, apart = late == 2, event_time
local is_late = late == 1 and now - event_time > window
local journaled = has(st, JOURNAL)
local erring = has(fl, ERRORS) -- then the part is one error, without its attempt and time
local expires = now + lease + window
if has(st, QUARANTINE) or journaled then
  expires = FOREVER
elseif has(st, SLIDING) then
  expires = now + window
end
local head = spack(HEADER, VERSION, st, fl, 1, expires, now + lease, now)
local till = expires < FOREVER and milliseconds(math.max(expires, now + lease))

local function set_new(key, raw)
  if till then
    return pcall_('SET', key, raw, 'PX', till, 'NX')
  end
  return pcall_('SET', key, raw, 'NX')
end

local function give(i, key, r, had)
  if bare and r.journal then
    out[i - 1] = 'T'
  elseif store(i, key, r, had) then
    r.errors = nil -- the caller needs none
    say(i, 'G', close(r))
  end
end

local function grant(i, key, arg, fence, orphan)
  local r = open(head .. arg)
  local error_ = r.errors
  r.fence, r.seen, r.errors = fence, now, nil
  if orphan then
    r.attempt, r.seen = orphan.attempt + 1, orphan.seen
    r.steps, r.errors = orphan.steps, orphan.errors
    if orphan.owner ~= '' and orphan.owner ~= r.owner then r.errors = with_lease_end(orphan) end
    r.journal = orphan.journal or r.journal
    if not r.print or r.print == '' then r.print = orphan.print end
    if not r.meta or r.meta == '' then r.meta = orphan.meta end
    r.type = r.type or orphan.type
    if orphan.anchor then
      r.anchor, r.horizon, r.sliding = orphan.anchor, orphan.horizon, true
    end
  end
  if error_ then r.errors = with_error(r.errors, r.attempt, now, error_) end
  if r.quarantine or r.journal then
    r.expires = FOREVER
  elseif r.anchor then
    r.expires = r.horizon
  elseif orphan and r.sliding then
    r.expires = orphan.expires
  end
  give(i, key, r, orphan and orphan.journal)
end

-- The event's own time and its horizon, read from an item.
local function anchor_of(arg)
  return sunpack('>I7I7', arg, 2 + byte(arg))
end

-- The first event of its key, as far as the records show, unless it is older than the records reach.
local function begin(i, key, arg, fence)
  local happened = event_time
  local is_over = is_late
  if anchored then
    local horizon
    happened, horizon = anchor_of(arg)
    is_over = now + apart > horizon or happened - now > AHEAD_US
  end
  if is_over then
    return say(i, 'L', number(now - happened))
  end
  return grant(i, key, arg, fence, nil)
end

-- Equal content at another time: it is granted once the earlier event is settled, or will not be taken over any more.
local function again(i, key, arg, r)
  local happened = anchor_of(arg)
  if happened < r.anchor then
    say(i, 'L', number(now - happened))
  elseif r.state == UNKNOWN then
    say(i, 'U', number(r.at))
  elseif r.state == CLAIMED and r.at > now then
    say(i, 'B', number(r.at - now))
  elseif r.state == CLAIMED and r.expires >= FOREVER then
    say(i, 'B', number(lease))
  elseif r.state == CLAIMED and r.at + apart > now then
    say(i, 'B', number(r.at + apart - now))
  else
    begin(i, key, arg, next_fence(r.fence))
  end
end

local function differs(mine, stored)
  return mine and stored and mine ~= '' and stored ~= '' and byte(mine) == byte(stored) and mine ~= stored
end

-- A duplicate needs no errors.
local function answer(i, raw)
  if has(byte(raw, 3), ERRORS) then
    local r = open(raw)
    r.errors = nil
    raw = close(r)
  end
  say(i, 'K', raw)
end

-- The usual duplicate: settled, and no fingerprint or anchor to compare.
local function known(i, raw)
  if refreshing or #raw <= HEADER_BYTES then return false end
  local version, rst, rfl, _, over = sunpack(HEADER, raw)
  local state = rst % 8
  if version ~= VERSION or (state ~= DONE and state ~= FAILED) or over <= now then return false end
  if has(fl, PRINT) and has(rfl, PRINT) or anchored and has(rfl, ANCHOR) then return false end
  if has(rfl, ERRORS) then return (pcall(answer, i, raw)) end
  say(i, 'K', raw)
  return true
end

local function claim(i, key, arg, raw)
  local stored = open(raw)
  local fence = stored.fence
  local r = standing(stored)
  if not r or r.state == FORGOTTEN then
    return begin(i, key, arg, next_fence(fence))
  end
  if anchored and r.anchor and math.abs(anchor_of(arg) - r.anchor) >= apart then
    return again(i, key, arg, r)
  end
  local mine = has(fl, PRINT) and open(head .. arg).print
  if differs(mine, r.print) then
    out[i - 1] = 'M'
  elseif r.state == CLAIMED then
    if r.at <= now then
      return grant(i, key, arg, next_fence(fence), r)
    end
    local n = byte(arg)
    if r.owner == sub(arg, 2, 1 + n) and n > 0 then
      move(r, now + lease) -- repeated because the reply was lost: the owner counts its lease from this try
      return give(i, key, r, r.journal)
    end
    say(i, r.journal and 'J' or 'B', number(r.at - now))
  elseif r.state == UNKNOWN then
    local at = number(r.at)
    if not r.changed or (bare and r.journal) or store(i, key, r, r.journal) then
      say(i, 'U', at)
    end
  elseif refreshing and not r.anchor and now + window > r.expires then
    r.expires = now + window
    if store(i, key, r, nil) then answer(i, close(r)) end
  else
    answer(i, raw)
  end
end

for i = 2, #KEYS do
  local key, arg = KEYS[i], ARGV[i + 6]
  if spent > room then
    out[i - 1] = '+'
  else
    local raw
    local written = false
    if is_late or anchored or erring or (bare and journaled) then
      raw = pcall_('GET', key)
    else
      written = set_new(key, head .. arg)
      raw = not written and pcall_('GET', key)
      if written and written.err then
        raw = pcall_('GET', key) -- at the memory limit, known records still answer
        if raw == false then denied(i, written) end
        written = false
      end
    end
    if written then
      out[i - 1] = 'F'
      if journaled then
        call('ZADD', journals(key), number(now + lease), sub(key, -16))
      end
    elseif out[i - 1] == nil then
      if raw == false then
        if not is_late and not anchored and not erring then
          out[i - 1] = 'T'
        elseif not pcall(begin, i, key, arg, now) then
          out[i - 1] = 'X'
        end
      elseif type(raw) == 'table' then
        out[i - 1] = 'X'
      elseif not known(i, raw) and not pcall(claim, i, key, arg, raw) then
        out[i - 1] = 'X'
      end
    end
  end
end

return finish()
