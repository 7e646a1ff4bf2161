-- LEVEL: report a worker's load without reading entries. A repeated call changes nothing.
-- KEYS  w, held, q... of entries that it could return
-- ARGV  worker id, number of requests that it holds, requests that it has room for
-- reply {FENCED} | {OK, number of requests of the least loaded peer with room; -1 if there is none, or if entries wait that
--       peers can read}
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'FENCED'}
end
local worker = ARGV[1]
local held = math.max(0, math.min(math.floor(tonumber(ARGV[2]) or 0), 1048576)) -- the same bounds as in TAKE
if (tonumber(ARGV[3]) or 0) > 0 then
  redis.call('ZADD', KEYS[2], 'XX', held, worker) -- only TAKE adds a member
else
  redis.call('ZREM', KEYS[2], worker)
end
for i = 3, #KEYS do
  if num_waiting(KEYS[i]) > 0 then
    return {'OK', -1}
  end
end
local lowest = redis.call('ZRANGE', KEYS[2], 0, 1, 'WITHSCORES')
return {'OK', tonumber(lowest[1] == worker and lowest[4] or lowest[1] ~= worker and lowest[2]) or -1}
