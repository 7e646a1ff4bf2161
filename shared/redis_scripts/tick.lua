#!lua flags=allow-oom
-- TICK: the fleet clock, which no wall clock affects: the maximum of the caller's count and the stored value. A worker
-- also beats, that is, it stores the clock's time beside its id, and one worker is the observer, who looks for dead workers
-- (presence.py). Its lease ends unless it ticks again; a steady worker takes it from one that is not. Old beats must not end
-- workers when the store is full, so this script writes even then.
-- KEYS  clock. A worker adds: beats, observer
-- ARGV  milliseconds of the caller's count. A worker adds: its id, '' before it is registered; its lease in milliseconds;
--       1 if it is steady
-- reply {milliseconds, 1 if the caller is the observer, beats: 0, 1, or 2 for more}
local now = math.max(tonumber(redis.call('GET', KEYS[1])) or 0, tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%d', now))
local beats, observer = KEYS[2], KEYS[3]
if not beats then
  return {now, 0, 0}
end
local id, lease, steady = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local observes = 0
if id ~= '' then
  redis.call('ZADD', beats, now, id)
  local held = redis.call('HMGET', observer, 'id', 'until', 'steady')
  local until_ms = tonumber(held[2]) or 0
  local is_free = until_ms < now or until_ms > now + lease
  if held[1] == id or is_free or (steady == '1' and held[3] ~= '1') then
    redis.call('HSET', observer, 'id', id, 'until', string.format('%d', now + lease), 'steady', steady)
    observes = 1
  end
end
return {now, observes, #redis.call('ZRANGE', beats, 0, 1)}
