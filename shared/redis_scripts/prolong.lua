-- PROLONG: extend the life of a kept answer's parts while the answer continues. The client's name, and requests that end before
-- others of the answer, would expire otherwise. The holder calls it from time to time, and once more at the end of the answer, so
-- that the whole answer can be read as long as any kept request.
-- Keys without an expiry get none, and longer ones (of a dead letter) are not shortened.
-- KEYS  i (or the first r again), (r, j)...
-- ARGV  first request id, seconds to keep i, seconds to keep r and j
-- reply 1, or 0 if the name belongs to another answer, or there is none
local id, name_seconds, keep_seconds = unpack(ARGV)
for n = 2, #KEYS do
  redis.call('EXPIRE', KEYS[n], keep_seconds, 'GT')
end
if KEYS[1] == KEYS[2] or redis.call('HGET', KEYS[1], 'id') ~= id then
  return 0
end
return redis.call('EXPIRE', KEYS[1], name_seconds)
