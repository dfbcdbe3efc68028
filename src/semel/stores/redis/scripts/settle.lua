-- The operations on a record after its claim; each item is about another record.
--
-- Shared fields: empty if the items are complete. Or the beginning of a settle: then an item is only
-- I7 fence, B+ owner, I4+ value.
-- S settle   B kind, B to, B options, d fence, d window, d lease, d delay; d event time (option 16), B+ owner,
--            H+ name (option 8), I4+ error (option 64), I4+ value
-- R renew    B kind, B options, d fence, d lease; B+ owner, then a step (option 1): H+ name, I4+ value + 1 or 0
-- L lookup   B kind; the consumer's tag
-- F forget   B kind, B force, d fence or -1, B state or 255; the consumer's tag
-- V resolve  B kind, B options, d fence, d window; I4+ value (option 1); option 2: to absent;
--            option 4: claimed, with the lease in place of the window, and B+ owner
-- W window   B kind, d window
-- P purge    B kind: remove it from the list of journaled claims if it is not one
--
-- C completed  A already (when)  D already, with another value (when)  R recreated  L lost  N renewed  a absent  r the record as stored  m a mark (expiry)
-- f forgotten (fence)  B busy (rest)  J busy, journaled (rest)  n needs the name  O no memory  X corrupt  T try again

local find = string.find
local TOMBSTONE_US = 43200000000
local NULL = 'jnull' -- a value that is stored as a flag
local SETTLE, SETTLE_BYTES = '>BBBdddd', 35
local RELEASED = 5 -- a target of a settle, as are DONE, FAILED and UNKNOWN
local WITH_VALUE, SLIDES, COUNTED, NAMED, ANCHORED, VOID, ERRING = 1, 2, 4, 8, 16, 32, 64 -- void: the value is null
local SLACK_US = 60000000 -- the server may remove a record this much too late, if that saves work

local function changed(i, key, r, had, letter)
  if bare and (r.journal or had) then
    out[i - 1] = 'T'
    return false
  end
  if not store(i, key, r, had) then return false end
  has_ended(key)
  if letter then out[i - 1] = letter end
  return true
end

local function owner_of(arg, at)
  local n = byte(arg, at)
  return sub(arg, at + 1, at + n), at + 1 + n
end

-- The position of the owner in a settle.
local function owner_at(options)
  return SETTLE_BYTES + (has(options, ANCHORED) and 9 or 1)
end

-- The name, the error and the value of a settle, after its owner; nil where there is none.
local function parts_of(arg, at, options)
  local name, error_, value
  if has(options, NAMED) then
    local length = sunpack('>H', arg, at)
    name = sub(arg, at + 2, at + 1 + length)
    at = at + 2 + length
  end
  if has(options, ERRING) then
    local length = sunpack('>I4', arg, at)
    error_ = sub(arg, at + 4, at + 3 + length)
    at = at + 4 + length
  end
  if has(options, WITH_VALUE) then value = sub(arg, at + 4) end
  return name, error_, value
end

local function bury(i, key, r)
  local tombstone = {
    state = FORGOTTEN, owner = '', fence = next_fence(r.fence), attempt = 0, expires = now + TOMBSTONE_US, at = 0,
    seen = r.seen, name = r.name,
  }
  if changed(i, key, tombstone, r.journal) then
    say(i, 'f', number(tombstone.fence))
  end
end

-- Give an unknown record to a new owner, or to none, with a new fence that refuses its late owner.
local function take(i, key, r, owner, lease_until)
  r.state, r.owner, r.fence, r.at = CLAIMED, owner, next_fence(r.fence), lease_until
  if changed(i, key, r, r.journal) then
    say(i, 'f', number(r.fence))
  end
end

-- Reset the record as if its event had just come and been released: the source will not send the event again.
local function anew(i, key, r)
  r.attempt, r.steps = 0, nil
  take(i, key, r, '', now)
end

local function recreate(i, key, arg)
  local _, to, options, fence, window, lease = sunpack(SETTLE, arg)
  if to ~= DONE and to ~= FAILED then
    out[i - 1] = 'L'
    return
  end
  local expires, anchor = fence + window, nil
  if has(options, ANCHORED) then
    anchor = sunpack('>d', arg, SETTLE_BYTES + 1)
    expires = anchor + window
  elseif not has(options, SLIDES) then
    expires = expires + lease
  end
  if expires <= now then
    out[i - 1] = 'R'
    return
  end
  if not has(options, NAMED) then
    out[i - 1] = 'n'
    return
  end
  local r = {state = to, fence = fence, seen = fence, attempt = 1, expires = expires, at = now}
  r.anchor, r.horizon = anchor, expires
  local at
  r.owner, at = owner_of(arg, owner_at(options))
  r.sliding = has(options, SLIDES)
  local name, error_, value = parts_of(arg, at, options)
  if name ~= '' then r.name = name end
  if error_ then r.errors = with_error(nil, 1, now, error_) end
  r.value, r.nothing = value, has(options, VOID)
  changed(i, key, r, true, 'R')
end

-- Write the end of a claim.
local function conclude(i, key, r, to, options, window, delay, value)
  local had = r.journal
  if to == DONE or to == FAILED then
    if r.anchor then
      r.expires = r.horizon
    elseif not r.sliding then
      r.expires = now + window
    elseif r.expires >= FOREVER then
      r.expires = r.seen + window
    end
    r.state, r.at, r.journal, r.value = to, now, nil, value
    r.nothing = has(options, VOID)
  elseif to == UNKNOWN then
    r.state, r.at, r.expires = UNKNOWN, now, FOREVER
  else
    move(r, now + delay)
    r.owner = ''
    if not has(options, COUNTED) then r.attempt = math.max(r.attempt - 1, 0) end
  end
  changed(i, key, r, had, 'C')
end

local function settle(i, key, arg, r)
  local _, to, options, fence, window, _, delay = sunpack(SETTLE, arg)
  local owner, at = owner_of(arg, owner_at(options))
  if r.fence ~= fence or r.owner ~= owner or owner == '' then
    out[i - 1] = 'L'
  elseif r.state == to then
    local _, _, value = parts_of(arg, at, options)
    local old, new = r.value or r.nothing and NULL, value or has(options, VOID) and NULL
    say(i, (old or nil) == (new or nil) and 'A' or 'D', number(r.at))
  elseif r.state ~= CLAIMED and (r.state ~= UNKNOWN or to ~= DONE and to ~= FAILED) then
    out[i - 1] = 'L'
  else
    local _, error_, value = parts_of(arg, at, options)
    if error_ then r.errors = with_error(r.errors, r.attempt, now, error_) end
    conclude(i, key, r, to, options, window, delay, value)
  end
end

local function noted(steps, name)
  local at = 1
  while at <= #steps do
    local length = sunpack('>H', steps, at)
    if sub(steps, at + 2, at + 1 + length) == name then return true end
    at = at + 2 + length
    at = at + 4 + math.max(sunpack('>I4', steps, at) - 1, 0)
  end
  return false
end

local function renew(i, key, arg, r)
  local _, options, fence, lease = sunpack('>BBdd', arg)
  local owner, at = owner_of(arg, 19)
  if not r or r.state ~= CLAIMED or r.fence ~= fence or r.owner ~= owner or owner == '' then
    out[i - 1] = 'L'
    return
  end
  if bare and r.journal then
    out[i - 1] = 'T'
    return
  end
  move(r, now + lease)
  if has(options, 1) then
    local length = sunpack('>H', arg, at)
    if not noted(r.steps or '', sub(arg, at + 2, at + 1 + length)) then
      r.steps = (r.steps or '') .. sub(arg, at)
    end
  end
  if store(i, key, r, r.journal) then out[i - 1] = 'N' end
end

local function forget(i, key, arg, r)
  local _, force, fence, state = sunpack('>BBdB', arg)
  if (fence >= 0 and fence ~= r.fence) or (state < 255 and state ~= r.state) then
    out[i - 1] = 'L'
  elseif r.state == CLAIMED and r.owner ~= '' and r.at > now and force == 0 then
    say(i, r.journal and 'J' or 'B', number(r.at - now))
  else
    bury(i, key, r)
  end
end

local function resolve(i, key, arg, r)
  local _, options, fence, window = sunpack('>BBdd', arg)
  if not r or r.state ~= UNKNOWN or r.fence ~= fence then
    out[i - 1] = 'L'
  elseif has(options, 4) then
    r.attempt = r.attempt + 1
    take(i, key, r, owner_of(arg, 19), now + window)
  elseif has(options, 2) then
    if r.journal then anew(i, key, r) else bury(i, key, r) end
  else
    local had = r.journal
    r.state, r.at, r.expires, r.journal, r.value = DONE, now, r.horizon or now + window, nil, nil
    r.nothing = nil
    if has(options, 1) then r.value = sub(arg, 23) end
    changed(i, key, r, had, 'C')
  end
end

local function rewindow(i, key, arg, r)
  local _, window = sunpack('>Bd', arg)
  if not r or (r.state ~= DONE and r.state ~= FAILED) then
    out[i - 1] = 'L'
    return
  end
  if r.anchor then
    out[i - 1] = 'C' -- the event's own time sets the expiry
    return
  end
  r.expires = (r.sliding and r.seen or r.at) + window
  if store(i, key, r, nil) then out[i - 1] = 'C' end
end

-- A key without a record may be a mark, if marks are plain keys.
local function no_record(i, key, arg, forgets)
  local mark = sub(key, 1, -18) .. 'm' .. sub(arg, -4) .. sub(key, -16, -5)
  local stored = not bare and pcall_('GET', mark)
  local expires = tonumber(stored or nil)
  if stored == '' then expires = now + 1000 * call('PTTL', mark) end -- written by a plain command
  if not expires or expires <= now then
    out[i - 1] = 'a'
  elseif forgets then
    call('DEL', mark)
    has_ended(key)
    say(i, 'f', number(now))
  else
    say(i, 'm', number(expires))
  end
end

local function carry_out(i, key, arg, raw)
  local kind = byte(arg)
  if kind == 76 then -- L
    if raw then say(i, 'r', raw) else no_record(i, key, arg, false) end
    return
  end
  local r = raw and standing(open(raw)) or nil
  if kind == 83 then -- S
    if r then settle(i, key, arg, r) else recreate(i, key, arg) end
  elseif kind == 82 then
    renew(i, key, arg, r)
  elseif kind == 86 then
    resolve(i, key, arg, r)
  elseif kind == 87 then
    rewindow(i, key, arg, r)
  elseif kind == 80 then
    if not r or not r.journal or r.state ~= CLAIMED then call('ZREM', journals(key), sub(key, -16)) end
    out[i - 1] = 'C'
  elseif not r or r.state == FORGOTTEN then
    no_record(i, key, arg, true)
  else
    forget(i, key, arg, r)
  end
end

-- The usual case: complete a running claim. Claims of one batch differ only in their fence and owner, which are
-- adjacent, so the bytes before them are computed once.
local common = ARGV[7]
local ALIKE_BYTES = 19
local _, common_to, common_options, common_window, to_complete
if common ~= '' then
  _, common_to, common_options, _, common_window = sunpack(SETTLE, common)
  to_complete = common_to == DONE or common_to == FAILED
end
local seen, with_value, without, stays
local over = to_complete and now + common_window
local till = over and over < FOREVER and milliseconds(over)

local function successor(head)
  seen, with_value, without = head, nil, nil
  local version, st, fl, attempt, expires, lease_until = sunpack('>BBBHI7I7', head)
  if version ~= VERSION or st % 8 ~= CLAIMED or has(st, SLIDING) or has(st, JOURNAL) or has(st, VALUE) or has(fl, ANCHOR) then
    return
  end
  if lease_until <= now and (expires <= now or has(st, QUARANTINE)) then return end
  stays = expires < FOREVER and expires >= over and expires - over <= SLACK_US
  with_value = spack('>BBBHI7I7', VERSION, st + common_to + VALUE, fl, attempt, over, now)
  if has(common_options, VOID) then fl = fl + NOTHING end
  without = spack('>BBBHI7I7', VERSION, st + common_to, fl, attempt, over, now)
end

local function write(key, new)
  if till then return pcall_('SET', key, new, 'PX', till) end
  return pcall_('SET', key, new)
end

-- Strings are compared in place: cutting one out costs more than reading it.
local function quickly(i, key, arg, raw)
  if not seen or find(raw, seen, 1, true) ~= 1 then
    if #raw <= HEADER_BYTES then return false end
    successor(sub(raw, 1, ALIKE_BYTES))
  end
  local n = byte(arg, 8)
  if not without or n == 0 then return false end
  local done
  if #arg == 8 + n then
    if find(raw, arg, ALIKE_BYTES + 1, true) ~= ALIKE_BYTES + 1 then return false end
    if stays then -- the server's expiry is already late enough
      done = pcall_('SETRANGE', key, 0, without)
    else
      done = write(key, without .. sub(raw, ALIKE_BYTES + 1))
    end
  else
    if sub(raw, ALIKE_BYTES + 1, ALIKE_BYTES + 8 + n) ~= sub(arg, 1, 8 + n) then return false end
    done = write(key, with_value .. sub(raw, ALIKE_BYTES + 1) .. sub(arg, 9 + n))
  end
  if type(done) == 'table' and done.err then
    denied(i, done)
  else
    out[i - 1] = 'C'
    if channel then ended[#ended + 1] = sub(key, -16) end
  end
  return true
end

-- Return an item in its long form.
local function spelled(arg)
  if common == '' then return arg end
  local kind, to, options, _, window, lease, delay = sunpack(SETTLE, common)
  if #arg > 8 + byte(arg, 8) then options = options + WITH_VALUE end
  local fence = sunpack('>I7', arg)
  return spack(SETTLE, kind, to, options, fence, window, lease, delay) .. sub(arg, 8)
end

for i = 2, #KEYS do
  local key, arg = KEYS[i], ARGV[i + 6]
  if spent > room then
    out[i - 1] = '+'
  else
    local raw = pcall_('GET', key)
    if type(raw) == 'table' then
      out[i - 1] = 'X'
    elseif not (raw and to_complete and quickly(i, key, arg, raw)) then
      if not pcall(carry_out, i, key, spelled(arg), raw) then out[i - 1] = 'X' end
    end
  end
end

return finish()
