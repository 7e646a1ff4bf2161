-- TAKE: read new entries for a worker, by priority, without waiting. It must not be repeated after a lost reply: the worker's
-- pending list contains what it read.
-- Least-loaded dispatch: no worker gets more than a quantum above the least loaded worker with room (ADR 0091). Loads are those
-- that workers last reported. A worker that is out of patience removes lower loads, so a silent worker cannot stop others.
-- The queue before the last is read in the order of order.lua, the others in that of their streams.
-- A request that this worker cannot serve (capabilities.py) is moved to the second queue, which is read while its next entry fits.
-- An entry is left to its home for a short time (order.lua). If entries remain, the least loaded worker with room is woken.
-- KEYS  w, held, held of the last class, order, times, times of the last queue, q... in order of priority: four
-- ARGV  worker id, group, number of requests that it holds, 1 = out of patience, maximum of entries, requests that it has room
--       for, the same two for the last queue, prefix of r, prompt tokens of the queue before the last after which to stop (or
--       ''), assumed prompt tokens of an entry without a length, the worker's capabilities, its longest context in tokens (0:
--       unknown), the number of additional entries of flows that are not among the remaining arguments, the prefix of the control
--       channels, and flows. So a worker without room sees every API key's next request, and gives the key its share of the
--       running slots.
-- reply {FENCED} | {OK, {{q, entries}, ...}, entries that it could still have read, those of the last queue,
--       1 = entries wait that it must leave to peers}
local MAX_COUNT = 1048576

local function count_of(text) -- bounds what a worker reports, so that it cannot stop others
  return math.max(0, math.min(math.floor(tonumber(text) or 0), MAX_COUNT))
end

local worker, group, held, impatient = ARGV[1], ARGV[2], count_of(ARGV[3]), ARGV[4] == '1'

-- Return the number of requests of the least loaded peer with room; nil if there is none, or if nothing is wanted.
local function level_of(key, wanted)
  if wanted == 0 then
    return nil
  end
  if impatient then
    redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. held)
    return nil
  end
  local lowest = redis.call('ZRANGE', key, 0, 1, 'WITHSCORES')
  local level = lowest[1] == worker and lowest[4] or lowest[1] ~= worker and lowest[2]
  return level and count_of(level)
end

local function share(level, wanted, is_home)
  local most = impatient and QUANTUM or level and allowed_beside(level, is_home) - held or wanted
  return math.max(0, math.min(wanted, most))
end

if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'FENCED'}
end
local wanted, room, wanted_of_last, room_of_last = count_of(ARGV[5]), ARGV[6], count_of(ARGV[7]), ARGV[8]
local with_others = wanted + count_of(ARGV[14] or 0)
local level = level_of(KEYS[2], with_others)
local of_home = share(level, wanted, true)
local of_all = math.min(of_home, share(level, wanted))
local of_others = math.max(0, share(level, with_others) - of_all)
wanted_of_last = math.min(wanted, wanted_of_last)
local of_last = share(level_of(KEYS[3], wanted_of_last), wanted_of_last)
local found = {}
local missing = tonumber(ARGV[10]) or math.huge -- prompt tokens until it is enough
local turns = {order = KEYS[4], times = KEYS[5], gone = {}, left = {}, worker = worker, held = KEYS[2]}

local function is_enough()
  return missing <= 0
end

local FIRST, NEWER, IN_TURN, LAST = 7, 8, 9, 10
local lacking = bit.bnot(tonumber(ARGV[12]))
local max_context, num_moved = tonumber(ARGV[13]), 0
local counts, counts_of_last = {}, {} -- entries that no longer wait, by flow

local function fits(fields)
  return (not fields.n or bit.band(tonumber(fields.n), lacking) == 0)
    and (max_context == 0 or count_of(fields.l) <= max_context)
end

-- Leave an entry that was just read to another worker.
local function pass_on(q, entry, fields)
  local id, all = entry[1], entry[2]
  redis.call('XACK', q, group, id)
  redis.call('XDEL', q, id)
  if not fields.t then
    all[#all + 1], all[#all + 2] = 't', string.match(id, '^%d+')
  end
  local again = add_after(id, KEYS[NEWER], all)
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

-- Read entries, and pass on those that this worker cannot serve. Returns the fields and the ids of all.
-- `known` has their fields if they are known.
local function read_uncounted(q, limit, known)
  -- The read of the first queue fails if the store has lost the queues; the others need none if they are empty.
  local reply = (q == KEYS[FIRST] or redis.call('XLEN', q) > 0)
    and redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', limit, 'STREAMS', q, '>')
  local all, ids, kept = {}, {}, {}
  for n, entry in ipairs(reply and reply[1][2] or {}) do
    all[n], ids[n] = known and known[n] or fields_of(entry), entry[1]
    leave_home(turns, entry[1], not known and all[n].h)
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

local function read(q, limit)
  local by_flow = q == KEYS[IN_TURN] and counts or q == KEYS[LAST] and counts_of_last
  local all, ids = read_uncounted(q, limit)
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

local function read_while_it_fits(q, limit)
  local num_read = 0
  while num_read < limit and not is_enough() and next_fits(q) do
    num_read = num_read + #read(q, 1)
  end
  return num_read
end

-- The tokens of an entry are known after reading it: read one, then as many as suffice if they are alike.
local function read_on(q, limit)
  local all, before, count = {}, missing, 1
  while count > 0 do
    local entries = read(q, count)
    for _, entry in ipairs(entries) do
      all[#all + 1] = entry
    end
    if #entries < count or #all == limit or is_enough() then
      break
    end
    local mean = (before - missing) / #all
    count = math.min(limit - #all, mean > 0 and math.max(1, math.floor(missing / mean)) or limit)
  end
  return all
end

local taken, refused = 0, 0
turns.read, turns.read_on, turns.is_enough = read, read_on, is_enough

function turns.load()
  return held + taken
end

function turns.count(fields)
  count(fields, counts)
end

function turns.read_ahead(known)
  read_uncounted(KEYS[FIRST], #known, known)
end

local function num_left(i)
  return i == IN_TURN and turns.num_left or num_waiting(KEYS[i])
end

local may_remain = {}
local may_wait = false -- in the queue in fair order, which precedes the last queue
for i = FIRST, LAST do
  local is_last = i == LAST
  local limit = is_last and math.min(of_last, wanted) - taken or of_all - taken
  local num_read = 0
  if i == IN_TURN and of_home > taken then
    num_read, may_wait = read_in_turn(turns, KEYS[i], KEYS[FIRST], group, limit, of_home - taken, ARGV[9])
  elseif limit > 0 and i == NEWER then
    num_read = read_while_it_fits(KEYS[i], limit)
  elseif limit > 0 and not may_wait then
    num_read = #(is_last and read(KEYS[i], limit) or read_on(KEYS[i], limit))
  end
  taken = taken + num_read
  local limited = is_last and of_last < wanted_of_last or not is_last and of_all < wanted
  may_remain[i] = limited and num_read >= limit or num_read > 0 and (num_read == limit or is_enough())
  if limited and num_read >= limit and refused == 0 then
    local may_have_more = i == NEWER and next_fits(KEYS[i]) or i ~= NEWER and num_left(i) > 0
    refused = may_have_more and 1 or 0
  end
end
if of_others > 0 and num_waiting(KEYS[FIRST]) == 0 then
  local unwanted = {}
  for i = 16, #ARGV do
    unwanted[ARGV[i]] = true
  end
  taken = taken + read_of_others(turns, KEYS[IN_TURN], KEYS[FIRST], group, of_others, ARGV[9], unwanted)
end
if turns.has_left then
  refused = 1
end
save_turns(turns)
uncount(KEYS[5], counts, turns.start)
uncount(KEYS[6], counts_of_last)
taken = taken - num_moved
for i, left in ipairs({count_of(room) - taken, count_of(room_of_last) - taken}) do
  if left > 0 then
    redis.call('ZADD', KEYS[1 + i], held + taken, worker)
  else
    redis.call('ZREM', KEYS[1 + i], worker)
  end
end
for i = FIRST, LAST do
  if may_remain[i] and num_left(i) > 0 then
    wake(KEYS[i == LAST and 3 or 2], ARGV[15], 1, {[worker] = true})
    break
  end
end
return {'OK', found, math.max(0, of_all - taken), math.max(0, of_last - taken), refused}
