-- CLAIM: return what a worker needs to run entries that it has read, and mark their requests with the worker and the entry.
-- An entry that its request does not name belongs to an earlier acceptance and is ignored. So is an entry that is not pending for
-- this worker: the store lost its delivery in a failover, and gives or has given it to another worker.
-- The worker becomes the home of the requests' prefixes (homes.lua).
-- KEYS  w, homes, (q, r, j)...
-- ARGV  worker id, group, then entry id, prefix key or '' for each (q, r, j)
-- reply {FENCED} | {OK, {body, gateway id, attempt, solo, journal} or {} for a cancelled or ended request, ...}
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'FENCED'}
end
local worker, group = ARGV[1], ARGV[2]
local reply = {'OK'}
for i = 1, (#KEYS - 2) / 3 do
  local q, r, j, entry, prefix_key = KEYS[3 * i], KEYS[3 * i + 1], KEYS[3 * i + 2], ARGV[1 + 2 * i], ARGV[2 + 2 * i]
  local request = redis.pcall('HMGET', r, 'body', 'gateway', 'attempt', 'solo', 'state', 'entry')
  local journal = redis.pcall('GET', j) or ''
  if request.err or not request[1] or request[5] == 'done' or request[6] ~= entry or type(journal) == 'table'
    or not is_pending(q, group, entry, worker) then
    reply[#reply + 1] = {}
  else
    redis.call('HSET', r, 'worker', worker, 'claim', claim_of(worker, entry), 'state', 'running')
    if prefix_key ~= '' then
      settle(KEYS[2], prefix_key, worker)
    end
    reply[#reply + 1] = {request[1], request[2] or '', request[3] or '1', request[4] or '0', journal}
  end
end
return reply
