-- CANCEL: end a request that has not ended. Its worker learns of it from the hint, or from its next EMIT.
-- With a holder only that one lets go, with a gone gateway all that it had; nothing more happens while another holds the
-- request. A kept request stays, with `event` as its end; any other is forgotten. One whose gateways were all gone is marked
-- `orphaned`, as it goes on if one of them was only cut off (attach.lua), unless somebody asks for its end meanwhile. `asked` tells an end that somebody asked for
-- from that of a request whose holders are gone: who repeats the latter under its name is answered anew.
-- An entry that no worker has read is deleted here with its turn, or dead requests would fill the queue while all workers
-- are busy.
-- KEYS  r, j, order, times, q, resumed queue, queue of requests with needs
-- ARGV  request id, group, prefix of the control channels, holder or '', terminal event, blob of it, prefix of the gateway
--       channels, seconds to keep r and j, gone gateway or '', 1 = not if it
--       was begun
-- reply 1, or 0 when there was nothing to end
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
-- Its entry is in the queue of its class or, after a worker's death, in that of resumed requests, where the same entry id
-- can be another request's: compare.
for k = 5, #KEYS do
  local found = redis.call('XRANGE', KEYS[k], entry, entry)
  if #found == 1 and found[1][2][2] == id then
    local pending = redis.pcall('XPENDING', KEYS[k], group, entry, entry, 1)
    if pending.err or #pending == 0 then
      redis.call('XDEL', KEYS[k], entry)
      local flow = k == 5 and fields_of(found[1]).f
      if flow then
        redis.pcall('ZREM', KEYS[3], entry) -- without permission TAKE drops it
        uncount(KEYS[4], {[flow] = 1})
      end
    end
  end
end
return 1
