-- CLAIM: return what a worker needs to run entries that it has read, and mark their requests with the worker and the entry.
-- An entry that its request does not name belongs to an earlier acceptance and is ignored.
-- KEYS  w, (r, j)...
-- ARGV  worker id, entry id for each (r, j)
-- reply {FENCED} | {OK, {body, gateway id, attempt, solo, journal} or {} for a cancelled or ended request, ...}
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'FENCED'}
end
local reply = {'OK'}
for i = 2, #KEYS, 2 do
  local entry = ARGV[1 + i / 2]
  local request = redis.pcall('HMGET', KEYS[i], 'body', 'gateway', 'attempt', 'solo', 'state', 'entry')
  local journal = redis.pcall('GET', KEYS[i + 1]) or ''
  if request.err or not request[1] or request[5] == 'done' or request[6] ~= entry or type(journal) == 'table' then
    reply[#reply + 1] = {}
  else
    redis.call('HSET', KEYS[i], 'worker', ARGV[1], 'claim', entry, 'state', 'running')
    reply[#reply + 1] = {request[1], request[2] or '', request[3] or '1', request[4] or '0', journal}
  end
end
return reply
