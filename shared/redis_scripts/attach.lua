-- ATTACH: add a holder to a kept request. A hint tells its worker to publish to this gateway too. A hint may be lost, so a
-- gateway that receives nothing attaches again.
-- A request that ended only because the gateways of all its holders were gone (`orphaned`, see cancel.lua) is queued again
-- before all others, after its journal, if this gateway was a holder: the gateway was disconnected, and its client waits.
-- KEYS  r, j, resumed queue, queue of requests with needs
-- ARGV  request id, holder, gateway id, prefix of the control channels, 1 = this gateway was a holder before, held (homes.lua)
-- reply 1, 2 if it is queued again, or 0 if it has ended or is unknown
local r, j, resumed, newer = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, holder, gateway, prefix, again, held = unpack(ARGV)

local request = redis.call('HMGET', r, 'state', 'worker', 'record', 'orphaned', 'solo', 'needs', 'context', 'entry')
local state, worker, record, orphaned, solo, needs, context, entry = unpack(request)
if not state or not record then
  return 0
end
local reply = 1
if state == 'done' then
  if not orphaned or again ~= '1' then
    return 0
  end
  reply = 2
  redis.call('HDEL', r, 'orphaned', 'terminal', 'worker', 'claim')
  redis.call('HSET', r, 'state', 'queued', 'jl', redis.call('STRLEN', j),
    'entry', requeue(entry, resumed, newer, id, solo or '0', needs, context))
  wake(held, prefix, 1, {})
  redis.call('PERSIST', r)
  redis.call('PERSIST', j)
end
redis.call('HSET', r, 'h:' .. holder, gateway, 'gateway', gateway)
if worker then
  redis.call('PUBLISH', prefix .. worker, id .. ' ' .. gateway)
end
return reply
