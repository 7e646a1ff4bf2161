-- UNCLAIM: return requests that a worker has claimed and not started. They go to the queue of resumed requests, because they are
-- older than all unread ones of their class. Attempts and crashes do not change. An entry that is no longer pending for this
-- worker is skipped, so a repeated call does nothing. Also for entries that a worker has read, not claimed, and cannot serve: they
-- go to the queue of requests with needs, which is passed as `resumed`.
-- KEYS  w, resumed queue, queue of requests with needs, held, (q, r)...
-- ARGV  worker id, group, prefix of the control channels, (entry id, request id) for each (q, r), oldest first
-- reply {FENCED} | {OK, number of requeued requests}
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'FENCED'}
end
local worker, group = ARGV[1], ARGV[2]
local requeued = 0
for i = 1, (#KEYS - 4) / 2 do
  local q, r, entry, id = KEYS[3 + 2 * i], KEYS[4 + 2 * i], ARGV[2 + 2 * i], ARGV[3 + 2 * i]
  if is_pending(q, group, entry, worker) then
    redis.call('XACK', q, group, entry)
    redis.call('XDEL', q, entry)
    local request = redis.pcall('HMGET', r, 'worker', 'claim', 'solo', 'needs', 'context', 'entry', 'state')
    local is_claimed_here = request[2] == claim_of(worker, entry)
    local is_unclaimed = not request[1] and request[6] == entry and request[7] == 'queued'
    if is_claimed_here or is_unclaimed then
      local again = requeue(entry, KEYS[2], KEYS[3], id, request[3] or '0', request[4], request[5])
      redis.call('HDEL', r, 'worker', 'claim')
      redis.call('HSET', r, 'state', 'queued', 'entry', again)
      requeued = requeued + 1
    end
  end
end
if requeued > 0 then
  wake(KEYS[4], ARGV[3], requeued, {})
end
return {'OK', requeued}
