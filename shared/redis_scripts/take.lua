-- TAKE: read new entries for a worker, highest class first, without waiting. The one script that is not to be repeated
-- blindly: what a lost reply held is in the worker's own pending list.
-- It fills workers like water: none gets further than a quantum above the one that holds least of those that have room
-- (ADR 0091). These are known by what they said when they last asked; who does not ask any more is forgotten by a worker
-- that has lost its patience, so nothing here can keep work from all.
-- Of the queue before the last the entries are read in the order of order.lua; of the others in that of their streams.
-- A request that this worker cannot serve (capabilities.py) is moved to the second queue, which is read only as far as its
-- next entry fits.
-- KEYS  w, held, held of the last class, order, times, times of the last queue, q... in order of priority: four
-- ARGV  worker id, group, number of requests that it holds, 1 = out of patience, most entries, requests that it has room
--       for, then these two for the last queue, then the prefix of r, and so many tokens of prompts that are enough of
--       the queue before the last (or ''), what a prompt is likely to have whose entry does not tell, of this worker its
--       capabilities and its longest context in tokens (0: not known), and the entries that it takes beside these of flows
--       that are none of the rest: a worker without room sees every key's next request, and gives that key its share of the
--       running slots
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

if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'FENCED'}
end
local wanted, room, wanted_of_last, room_of_last = count_of(ARGV[5]), ARGV[6], count_of(ARGV[7]), ARGV[8]
local of_all = share(KEYS[2], wanted)
local of_last = share(KEYS[3], math.min(wanted, wanted_of_last))
local of_others = math.max(0, share(KEYS[2], wanted + count_of(ARGV[14] or 0)) - of_all)
local found = {}
local missing = tonumber(ARGV[10]) or math.huge -- tokens of prompts

local function is_enough()
  return missing <= 0
end

local FIRST, NEWER, IN_TURN, LAST = 7, 8, 9, 10
local lacking = bit.bnot(tonumber(ARGV[12]))
local max_context, num_moved = tonumber(ARGV[13]), 0
local counts, counts_of_last = {}, {} -- of entries that wait no more, by flow

local function fits(fields)
  return (not fields.n or bit.band(tonumber(fields.n), lacking) == 0)
    and (max_context == 0 or count_of(fields.l) <= max_context)
end

-- Let an entry that was just read wait for another worker.
local function pass_on(q, entry, fields)
  local id, all = entry[1], entry[2]
  redis.call('XACK', q, group, id)
  redis.call('XDEL', q, id)
  if not fields.t then
    all[#all + 1], all[#all + 2] = 't', string.match(id, '^%d+')
  end
  local again = redis.call('XADD', KEYS[NEWER], '*', unpack(all))
  if redis.pcall('HGET', ARGV[9] .. fields.r, 'entry') == id then
    redis.call('HSET', ARGV[9] .. fields.r, 'entry', again)
  end
  num_moved = num_moved + 1
end

local function count(fields, by_flow)
  if fits(fields) then
    missing = missing - count_of(fields.p or ARGV[11])
  end
  if by_flow and fields.f then
    by_flow[fields.f] = (by_flow[fields.f] or 0) + 1
  end
end

-- Read entries, and pass on those that this worker cannot serve. Returns the fields of all of them by position, and their ids.
local function read_uncounted(q, most)
  local reply = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', most, 'STREAMS', q, '>')
  local all, ids, kept = {}, {}, {}
  for n, entry in ipairs(reply and reply[1][2] or {}) do
    all[n], ids[n] = fields_of(entry), entry[1]
    if fits(all[n]) then
      kept[#kept + 1] = entry
    else
      pass_on(q, entry, all[n])
    end
  end
  if #kept > 0 then
    found[#found + 1] = {reply[1][1], kept}
  end
  return all, ids
end

local function read(q, most)
  local by_flow = q == KEYS[IN_TURN] and counts or q == KEYS[LAST] and counts_of_last
  local all, ids = read_uncounted(q, most)
  for _, fields in ipairs(all) do
    count(fields, by_flow)
  end
  return ids
end

local function next_fits(q)
  if redis.call('XLEN', q) == 0 then
    return false
  end
  local next_one = redis.call('XRANGE', q, '(' .. last_read_of(q, group), '+', 'COUNT', 1)[1]
  return next_one and fits(fields_of(next_one))
end

local function read_while_it_fits(q, most)
  local num_read = 0
  while num_read < most and not is_enough() and next_fits(q) do
    num_read = num_read + #read(q, 1)
  end
  return num_read
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

local taken, refused = 0, 0
local turns = {order = KEYS[4], times = KEYS[5], read = read, read_on = read_on, is_enough = is_enough}

function turns.count(fields)
  count(fields, counts)
end

function turns.read_ahead(most)
  read_uncounted(KEYS[FIRST], most)
end

local may_wait = false -- of those in turn: they come before the last queue
for i = FIRST, LAST do
  local is_last = i == LAST
  local most = is_last and math.min(of_last, wanted) - taken or of_all - taken
  local num_read = 0
  if most > 0 and i == IN_TURN then
    num_read, may_wait = read_in_turn(turns, KEYS[i], KEYS[FIRST], group, most, ARGV[9])
  elseif most > 0 and i == NEWER then
    num_read = read_while_it_fits(KEYS[i], most)
  elseif most > 0 and not may_wait then
    num_read = #(is_last and read(KEYS[i], most) or read_on(KEYS[i], most))
  end
  taken = taken + num_read
  local limited = is_last and of_last < math.min(wanted, wanted_of_last) or not is_last and of_all < wanted
  if limited and num_read >= most and refused == 0 then
    local may_have_more = i == NEWER and next_fits(KEYS[i]) or i ~= NEWER and num_waiting(KEYS[i]) > 0
    refused = may_have_more and 1 or 0
  end
end
if of_others > 0 and num_waiting(KEYS[FIRST]) == 0 then
  local unwanted = {}
  for i = 15, #ARGV do
    unwanted[ARGV[i]] = true
  end
  taken = taken + read_of_others(turns, KEYS[IN_TURN], KEYS[FIRST], group, of_others, ARGV[9], unwanted)
end
uncount(KEYS[5], counts)
uncount(KEYS[6], counts_of_last)
taken = taken - num_moved
for i, left in ipairs({count_of(room) - taken, count_of(room_of_last) - taken}) do
  if left > 0 then
    redis.call('ZADD', KEYS[1 + i], held + taken, worker)
  else
    redis.call('ZREM', KEYS[1 + i], worker)
  end
end
return {'OK', found, math.max(0, of_all - taken), math.max(0, of_last - taken), refused}
