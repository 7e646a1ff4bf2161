-- TICK: the fleet's clock, which no wall clock moves: what the caller has counted since it last saw it, or what others have.
-- KEYS  clock
-- ARGV  milliseconds by the caller's count
-- reply milliseconds
local now = math.max(tonumber(redis.call('GET', KEYS[1])) or 0, tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%d', now))
return now
