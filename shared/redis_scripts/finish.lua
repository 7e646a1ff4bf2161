-- FINISH: end requests. Acknowledges and deletes their entries, stores the terminal event in r for gateways that miss the
-- message, and publishes it. An entry that is no longer pending for this worker is skipped, so a repeated call does nothing. A
-- request that no longer belongs to this worker by this entry (emit.lua) does not end; only its entry is deleted.
-- After a failover the store may lack the last writes. Without the last EMIT nothing ends, because journals lack the last tokens.
-- Without the CLAIM the entry stays pending. So does the entry of a request that CLAIM did not find (its terminal event is empty)
-- and that is there again. The worker finds such entries when it rereads its own.
-- KEYS  w, (q, r, j)...
-- ARGV  worker id, step of the last EMIT, group, seconds to keep r and j, (entry id, terminal event) for each, messages
--       (publish.lua). An empty step is not compared.
-- reply {FENCED} | {GAP, stored step} | {OK, number of deleted entries}
local worker, step, group, keep_seconds = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local stored = tonumber(redis.call('GET', KEYS[1]))
if not stored then
  return {'FENCED'}
end
if step and stored < step then
  return {'GAP', stored}
end
local count = (#KEYS - 1) / 3
local ended, lost = 0, {}

for i = 1, count do
  local q, r, j = KEYS[3 * i - 1], KEYS[3 * i], KEYS[3 * i + 1]
  local entry, event = ARGV[3 + 2 * i], ARGV[4 + 2 * i]
  local request = redis.pcall('HMGET', r, 'worker', 'claim', 'entry', 'state')
  local is_claimed_here = request[2] == claim_of(worker, entry)
  local waits = not request[1] and request[3] == entry and request[4] == 'queued'
  local mine = false
  if not waits and not (is_claimed_here and event == '') and is_pending(q, group, entry, worker) then
    ended = ended + 1
    redis.call('XACK', q, group, entry)
    redis.call('XDEL', q, entry)
    mine = is_claimed_here
    if mine then
      redis.call('HSET', r, 'state', 'done', 'terminal', event)
      redis.call('EXPIRE', r, keep_seconds)
      redis.call('EXPIRE', j, keep_seconds)
    elseif redis.call('EXISTS', r) == 0 then
      redis.call('UNLINK', j)
    end
  end
  if not mine then
    lost[i - 1] = true
  end
end

publish(5 + 2 * count, lost)
return {'OK', ended}
