-- TAKE: read new entries for a worker, highest class first, without waiting. The one script that is not to be repeated
-- blindly: what a lost reply held is in the worker's own pending list.
-- It fills workers like water: none gets further than a quantum above the one that holds least of those that have room
-- (ADR 0091). These are known by what they said when they last asked; who does not ask any more is forgotten by a worker
-- that has lost its patience, so nothing here can keep work from all.
-- Of the queue in the middle the entries are read in the order of order.lua; of the others in that of their streams.
-- KEYS  w, held, held of the last class, order, times, q... in order of priority: three
-- ARGV  worker id, group, number of requests that it holds, 1 = out of patience, most entries, requests that it has room
--       for, then these two for the last queue, then the prefix of r, and so many tokens of prompts that are enough of
--       the queue in the middle (or ''), and what a prompt is likely to have whose entry does not tell, then the entries
--       that it takes beside these of flows that are none of the rest: a worker without room sees every key's next request,
--       and gives that key its share of the running slots
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
local of_others = math.max(0, share(KEYS[2], wanted + count_of(ARGV[12] or 0)) - of_all)
local found = {}
local missing = tonumber(ARGV[10]) or math.huge -- tokens of prompts

local function is_enough()
  return missing <= 0
end

local function tokens_of(entry)
  local fields = entry[2] or {}
  for f = 1, #fields, 2 do
    if fields[f] == 'p' then
      return count_of(fields[f + 1])
    end
  end
  return count_of(ARGV[11])
end

local function read(q, most)
  local reply = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', most, 'STREAMS', q, '>')
  local entries = {}
  if reply then
    found[#found + 1] = reply[1]
    for n, entry in ipairs(reply[1][2]) do
      entries[n] = entry[1]
      missing = missing - tokens_of(entry)
    end
  end
  return entries
end

-- What an entry has is known when it is read: the first one alone, then as many as are enough if they are like those.
local function read_on(q, most)
  local all, before, count = {}, missing, 1
  while count > 0 do
    local entries = read(q, count)
    for _, entry in ipairs(entries) do
      all[#all + 1] = entry
    end
    if #entries < count or #all == most or is_enough() then
      break
    end
    local mean = (before - missing) / #all
    count = math.min(most - #all, mean > 0 and math.max(1, math.floor(missing / mean)) or most)
  end
  return all
end

local FIRST, IN_TURN, LAST = 6, 7, 8
local order, times, taken, refused = KEYS[4], KEYS[5], 0, 0
local may_wait = false -- of those in turn: they come before the last queue
for i = FIRST, LAST do
  local is_last = i == LAST
  local most = is_last and math.min(of_last, wanted) - taken or of_all - taken
  local num_read = 0
  if most > 0 and i == IN_TURN then
    num_read, may_wait = read_in_turn(order, times, KEYS[i], KEYS[FIRST], group, most, ARGV[9], read, read_on,
      is_enough)
  elseif most > 0 and not may_wait then
    num_read = #(is_last and read(KEYS[i], most) or read_on(KEYS[i], most))
  end
  taken = taken + num_read
  local limited = is_last and of_last < math.min(wanted, wanted_of_last) or not is_last and of_all < wanted
  if limited and num_read >= most and refused == 0 and waits(KEYS[i]) then
    refused = 1
  end
end
if of_others > 0 and not waits(KEYS[FIRST]) then
  local unwanted = {}
  for i = 13, #ARGV do
    unwanted[ARGV[i]] = true
  end
  taken = taken + read_of_others(order, times, KEYS[IN_TURN], KEYS[FIRST], group, of_others, ARGV[9], unwanted, read)
end
for i, left in ipairs({count_of(room) - taken, count_of(room_of_last) - taken}) do
  if left > 0 then
    redis.call('ZADD', KEYS[1 + i], held + taken, worker)
  else
    redis.call('ZREM', KEYS[1 + i], worker)
  end
end
return {'OK', found, math.max(0, of_all - taken), math.max(0, of_last - taken), refused}
