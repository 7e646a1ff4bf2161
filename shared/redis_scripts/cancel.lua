-- CANCEL: forget a request that has not ended. Its worker learns of it from the hint, or from its next EMIT.
-- An entry that no worker has read is deleted here, or dead requests would fill the queue while all workers are busy.
-- KEYS  r, j, q
-- ARGV  request id, group, prefix of the control channels
-- reply 1, or 0 when there was nothing to cancel
local r, j, q = KEYS[1], KEYS[2], KEYS[3]
local id, group, prefix = unpack(ARGV)

local request = redis.call('HMGET', r, 'state', 'worker', 'entry')
local state, worker, entry = unpack(request)
if not state or state == 'done' then
  return 0
end
redis.call('UNLINK', r, j)
if worker then
  redis.call('PUBLISH', prefix .. worker, id)
  return 1
end
-- The entry may be in the queue of resumed requests instead, where the same id can be another request's: compare.
local found = redis.call('XRANGE', q, entry, entry)
if #found == 1 and found[1][2][2] == id then
  local pending = redis.pcall('XPENDING', q, group, entry, entry, 1)
  if pending.err or #pending == 0 then
    redis.call('XDEL', q, entry)
  end
end
return 1
