-- TICK: the fleet clock, which no wall clock affects: the maximum of the caller's count and the stored value.
-- KEYS  clock
-- ARGV  milliseconds of the caller's count
-- reply milliseconds
local now = math.max(tonumber(redis.call('GET', KEYS[1])) or 0, tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%d', now))
return now
