-- TAKE: read new entries for a worker, highest class first, without waiting. The one script that is not to be repeated
-- blindly: what a lost reply held is in the worker's own pending list.
-- KEYS  w, q... in order of priority
-- ARGV  worker id, group, number of entries, the most of them out of the last queue
-- reply {FENCED} | {OK, {{q, entries}, ...}}
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'FENCED'}
end
local left, found = tonumber(ARGV[3]), {}
for i = 2, #KEYS do
  local count = i == #KEYS and math.min(left, tonumber(ARGV[4])) or left
  local reply = count > 0 and redis.call('XREADGROUP', 'GROUP', ARGV[2], ARGV[1], 'COUNT', count, 'STREAMS', KEYS[i], '>')
  if reply then
    found[#found + 1] = reply[1]
    left = left - #reply[1][2]
  end
end
return {'OK', found}
