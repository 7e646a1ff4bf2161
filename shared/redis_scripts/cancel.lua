-- CANCEL: end a request. Its worker learns it from a hint, or from its next EMIT.
-- With a holder only this holder is released, with a gone gateway all of its holders; the request continues while it has other
-- holders. A kept request stays, with `event` as its end; any other is deleted. `orphaned` marks a request that ended because
-- all gateways of its holders were gone: it continues if one of them was only disconnected (attach.lua), unless a client cancels
-- it. `asked` marks one that a client cancelled: a repeated request under its name gets this end, but one whose holders were
-- gone is computed again.
-- An entry that no worker has read is deleted with its place in the order, or dead requests would fill the queue while all
-- workers are busy.
-- KEYS  r, j, order, times, q, resumed queue, queue of requests with needs
-- ARGV  request id, group, prefix of the control channels, holder or '', terminal event, blob of it, prefix of the gateway
--       channels, seconds to keep r and j, gone gateway or '', 1 = only if no worker has started it
-- reply 1, or 0 if there was nothing to end
local r, j = KEYS[1], KEYS[2]
local id, group, prefix, holder, event, blob, gateway_prefix, keep_seconds, gone, unstarted = unpack(ARGV)

local request = redis.call('HMGET', r, 'state', 'worker', 'entry', 'record', 'gateway')
local state, worker, entry, record, newest = unpack(request)
if state == 'done' and holder == '' and gone == '' and unstarted ~= '1' then
  redis.call('HDEL', r, 'orphaned')
end
if not state or state == 'done' or (gone ~= '' and newest ~= gone) then
  return 0
end
if unstarted == '1' and (state ~= 'queued' or redis.call('STRLEN', j) > 0) then
  return 0
end
if record then
  if holder ~= '' then
    redis.call('HDEL', r, 'h:' .. holder)
  end
  local fields = redis.call('HGETALL', r)
  local gateways = {}
  for f = 1, #fields, 2 do
    if string.sub(fields[f], 1, 2) == 'h:' then
      if fields[f + 1] == gone then
        redis.call('HDEL', r, fields[f])
      else
        gateways[fields[f + 1]] = true
      end
    end
  end
  if (holder ~= '' or gone ~= '') and next(gateways) then
    redis.call('HSET', r, 'gateway', (next(gateways)))
    return 0
  end
  redis.call('HSET', r, 'state', 'done', 'terminal', event)
  if holder == '' and gone == '' then
    redis.call('HSET', r, 'asked', '1')
  end
  if gone ~= '' then
    redis.call('HSET', r, 'orphaned', '1')
  end
  redis.call('HDEL', r, 'worker', 'claim')
  redis.call('EXPIRE', r, keep_seconds)
  redis.call('EXPIRE', j, keep_seconds)
  for gateway in pairs(gateways) do
    redis.call('PUBLISH', gateway_prefix .. gateway, blob)
  end
else
  redis.call('UNLINK', r, j)
end
if worker then
  redis.call('PUBLISH', prefix .. worker, id)
  return 1
end
-- The entry is in the queue of its class, or in that of resumed requests after a worker's death, where another request may
-- have the same entry id: compare.
for k = 5, #KEYS do
  local found = redis.call('XRANGE', KEYS[k], entry, entry)
  if #found == 1 and found[1][2][2] == id then
    local pending = redis.pcall('XPENDING', KEYS[k], group, entry, entry, 1)
    if pending.err or #pending == 0 then
      redis.call('XDEL', KEYS[k], entry)
      local flow = k == 5 and fields_of(found[1]).f
      if flow then
        redis.pcall('ZREM', KEYS[3], entry) -- without permission, TAKE drops it
        uncount(KEYS[4], {[flow] = 1})
      end
    end
  end
end
return 1
