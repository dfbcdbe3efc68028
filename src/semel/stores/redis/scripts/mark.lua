-- Mark each key; 1: the key is new, 0: it is not. ARGV[7]: the window. ARGV[8]: r: the windows of known keys start again.
-- The value of a mark is its expiry. An empty one, written by a plain command, counts until the server removes it.

local refreshing = ARGV[8] == 'r'
local expires = number(now + ARGV[7])
local till = milliseconds(now + ARGV[7])

for i = 2, #KEYS do
  local key = KEYS[i]
  local done = pcall_('SET', key, expires, 'PX', till, 'NX')
  if done and not done.err then
    out[i - 1] = '1'
  else
    local known = pcall_('GET', key)
    if type(known) == 'string' then
      if known == '' then
        known = refreshing and now + 1000 * call('PTTL', key) or FOREVER
      else
        known = tonumber(known)
      end
      if not known then
        out[i - 1] = 'X'
      elseif known > now then
        out[i - 1] = '0'
        if refreshing and now + ARGV[7] > known then
          done = pcall_('SET', key, expires, 'PX', till)
          if done.err then denied(i, done) end
        end
      else
        done = pcall_('SET', key, expires, 'PX', till)
        if done.err then denied(i, done) else out[i - 1] = '1' end
      end
    elseif type(known) == 'table' then
      out[i - 1] = 'X'
    else
      denied(i, done)
    end
  end
end

return finish()
