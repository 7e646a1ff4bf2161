-- ATTACH: one more holder of a kept request. Its worker learns from the hint that this gateway listens too; a hint may be
-- lost, so a gateway that hears nothing attaches again.
-- KEYS  r
-- ARGV  request id, holder, gateway id, prefix of the control channels
-- reply 1, or 0 when the request has ended or is unknown
local r = KEYS[1]
local id, holder, gateway, prefix = unpack(ARGV)

local request = redis.call('HMGET', r, 'state', 'worker', 'record')
local state, worker, record = unpack(request)
if not state or state == 'done' or not record then
  return 0
end
redis.call('HSET', r, 'h:' .. holder, gateway, 'gateway', gateway)
if worker then
  redis.call('PUBLISH', prefix .. worker, id .. ' ' .. gateway)
end
return 1
