-- PROLONG: the life of a kept answer's parts follows the answer. Its client's name for it, and those of its requests that have
-- ended before the others, would expire while it goes on: whoever holds it says from time to time that it does, and at its end
-- once more, so that it can be given as a whole from then on for as long as any request is kept.
-- Nothing that has no end yet gets one, and nothing that is kept for longer (a dead letter) is shortened.
-- KEYS  i (or the first r again), (r, j)...
-- ARGV  first request id, seconds to keep i, seconds to keep r and j
-- reply 1, or 0 when the name stands for another answer, or there is none
local id, name_seconds, keep_seconds = unpack(ARGV)
for n = 2, #KEYS do
  redis.call('EXPIRE', KEYS[n], keep_seconds, 'GT')
end
if KEYS[1] == KEYS[2] or redis.call('HGET', KEYS[1], 'id') ~= id then
  return 0
end
return redis.call('EXPIRE', KEYS[1], name_seconds)
