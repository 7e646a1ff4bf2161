-- TAKE: read new entries for a worker, highest class first, without waiting. The one script that is not to be repeated
-- blindly: what a lost reply held is in the worker's own pending list.
-- It fills workers like water: none gets further than a quantum above the one that holds least of those that have room
-- (ADR 0091). These are known by what they said when they last asked; who does not ask any more is forgotten by a worker
-- that has lost its patience, so nothing here can keep work from all.
-- KEYS  w, held, held of the last class, q... in order of priority
-- ARGV  worker id, group, number of requests that it holds, 1 = out of patience, most entries, requests that it has room
--       for, then these two for the last queue
-- reply {FENCED} | {OK, {{q, entries}, ...}, entries that it could still have had, those of the last queue,
--       1 = others wait that it may not have}
local QUANTUM, QUANTUM_RATIO, MOST = 2, 8, 1048576

local function count_of(text) -- nothing that a worker says may be a number that stops others
  return math.max(0, math.min(math.floor(tonumber(text) or 0), MOST))
end

local worker, group, held, impatient = ARGV[1], ARGV[2], count_of(ARGV[3]), ARGV[4] == '1'

local function share(key, wanted)
  if wanted == 0 then
    return 0
  end
  if impatient then
    redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. held)
    return math.min(wanted, QUANTUM)
  end
  local lowest = redis.call('ZRANGE', key, 0, 1, 'WITHSCORES')
  local level = lowest[1] == worker and lowest[4] or lowest[1] ~= worker and lowest[2]
  if not level then
    return wanted
  end
  level = count_of(level)
  return math.max(0, math.min(wanted, level + math.max(QUANTUM, math.floor(level / QUANTUM_RATIO)) - held))
end

local function waits(q)
  local info = redis.pcall('XINFO', 'GROUPS', q)
  if info.err or not info[1] then
    return false
  end
  for i = 1, #info[1], 2 do
    if info[1][i] == 'pending' then
      return redis.call('XLEN', q) > info[1][i + 1]
    end
  end
end

if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'FENCED'}
end
local wanted, room, wanted_of_last, room_of_last = count_of(ARGV[5]), ARGV[6], count_of(ARGV[7]), ARGV[8]
local of_all = share(KEYS[2], wanted)
local of_last = share(KEYS[3], math.min(wanted, wanted_of_last))
local taken, found = 0, {}
local refused = 0
for i = 4, #KEYS do
  local is_last = i == #KEYS
  local most = is_last and math.min(of_last, wanted) - taken or of_all - taken
  local reply = most > 0 and redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', most, 'STREAMS', KEYS[i], '>')
  local num_read = reply and #reply[1][2] or 0
  if reply then
    found[#found + 1] = reply[1]
    taken = taken + num_read
  end
  local limited = is_last and of_last < math.min(wanted, wanted_of_last) or not is_last and of_all < wanted
  if limited and num_read >= most and refused == 0 and waits(KEYS[i]) then
    refused = 1
  end
end
for i, left in ipairs({count_of(room) - taken, count_of(room_of_last) - taken}) do
  if left > 0 then
    redis.call('ZADD', KEYS[1 + i], held + taken, worker)
  else
    redis.call('ZREM', KEYS[1 + i], worker)
  end
end
return {'OK', found, math.max(0, of_all - taken), math.max(0, of_last - taken), refused}
