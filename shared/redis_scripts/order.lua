-- Put before TAKE (redis_scripts.py): whose turn it is among interactive requests that no worker has read.
-- Start-time fair queueing over the keys that ask (Goyal, Vin and Cheng, 1996; ADR 0159): ACCEPT gives an entry the number at
-- which its key's turn begins, the end of that key's last one or, if that is over, the number of the entry that was read last;
-- the lowest is read next. So a key waits for its own requests and for a fair part of others', however many those are.
-- `order` has these numbers by entry, `times` the ends by key and, under '', the number of the last one read. Both are hints:
-- which requests there are and wait the streams alone say. An entry that is not in `order` has its turn when it is the oldest.
-- A group is read in the order of its stream alone, so a turn before that of older entries is moved to the end of `ahead`, the
-- queue before this one, of which everything has been read.
local MAX_STALE = 256 -- entries that others have read or cancelled, dropped by one call

local function entry_is_after(entry, other)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  local other_ms, other_number = string.match(other, '^(%d+)-(%d+)$')
  ms, other_ms = tonumber(ms), tonumber(other_ms)
  return ms > other_ms or ms == other_ms and tonumber(number) > tonumber(other_number)
end

local function last_read_of(q, group)
  local groups = redis.pcall('XINFO', 'GROUPS', q)
  for _, found in ipairs(groups.err and {} or groups) do
    local info = {}
    for i = 1, #found, 2 do
      info[found[i]] = found[i + 1]
    end
    if info['name'] == group then
      return info['last-delivered-id']
    end
  end
  return '0-0'
end

local function oldest_after(q, entry)
  local found = redis.call('XRANGE', q, '(' .. entry, '+', 'COUNT', 1)[1]
  return found and found[1]
end

-- Remove entries that have had their turn, and let the next turns of all flows begin at `start` or later.
local function had_turn(turns, entries, start)
  for i = 1, #entries, 1000 do -- Lua unpacks no more than 8,000
    redis.call('ZREM', turns.order, unpack(entries, i, math.min(i + 999, #entries)))
  end
  turns.start = math.max(turns.start or 0, tonumber(start) or 0)
end

local function save_start(turns)
  if turns.start and turns.start > (tonumber(redis.call('HGET', turns.times, '')) or 0) then
    redis.call('HSET', turns.times, '', turns.start)
  end
end

-- Move an entry to the end of `ahead`. Returns its fields, or nil if it is gone.
local function move_ahead(q, ahead, entry, r_prefix)
  local found = redis.call('XRANGE', q, entry, entry)[1]
  if not found then
    return nil
  end
  redis.call('XDEL', q, entry)
  local list = found[2]
  local r = r_prefix .. list[2] -- 'r' is first
  list[#list + 1] = 't'
  list[#list + 1] = string.match(entry, '^%d+') -- since when it waits
  local again = redis.call('XADD', ahead, '*', unpack(list))
  if redis.pcall('HGET', r, 'entry') == entry then -- else it was accepted anew since, and this entry is worth nothing
    redis.call('HSET', r, 'entry', again)
  end
  return fields_of(found)
end

-- Read up to `most` entries in turn, until `turns.is_enough()`. `turns.read(stream, count)` reads, counts and returns entry
-- ids; `turns.read_on` does so in the stream's order until it is enough. `turns.count(fields)` counts an entry that is moved
-- ahead, and `turns.read_ahead(count)` reads those. Returns the number of entries, and whether more may wait; if not, the
-- next turns begin anew.
local function read_in_turn(turns, q, ahead, group, most, r_prefix)
  local order, times = turns.order, turns.times
  local num_fields = redis.pcall('HLEN', times)
  if type(num_fields) ~= 'number' then
    num_fields = 0 -- a store whose users may not
  end
  if num_fields <= 2 then -- at most one key: the stream has their order
    local entries = turns.read_on(q, most)
    local may_wait = #entries == most or turns.is_enough()
    if num_fields > 0 and not may_wait then
      redis.call('DEL', order, times)
    elseif num_fields > 0 and #entries > 0 then
      had_turn(turns, entries, redis.call('ZSCORE', order, entries[#entries]))
      save_start(turns)
    end
    return #entries, may_wait
  end
  local last, oldest = last_read_of(q, group), nil
  local oldest_start -- false: it has no number
  local taken, moved, stale = 0, 0, 0 -- `moved`: of those taken, at the end of `ahead` and not read yet

  local function read_moved()
    if moved > 0 then
      turns.read_ahead(moved)
      moved = 0
    end
  end

  while taken < most and not turns.is_enough() do
    if not oldest then
      oldest = oldest_after(q, last)
      if not oldest then
        read_moved()
        redis.call('DEL', order, times)
        return taken, false
      end
      oldest_start = redis.call('ZSCORE', order, oldest)
    end
    local first, start = unpack(redis.call('ZRANGE', order, 0, 0, 'WITHSCORES'))
    if first == oldest or not oldest_start or stale == MAX_STALE then
      read_moved()
      taken = taken + #turns.read(q, 1)
      had_turn(turns, {oldest}, oldest_start)
      last, oldest = oldest, nil
    else
      local fields = entry_is_after(first, last) and move_ahead(q, ahead, first, r_prefix)
      if fields then
        turns.count(fields)
        taken, moved = taken + 1, moved + 1
        had_turn(turns, {first}, start)
      else
        stale = stale + 1
        redis.call('ZREM', order, first)
      end
    end
  end
  read_moved()
  save_start(turns)
  return taken, true
end

local MOST_LOOKED_AT = 64 -- entries whose turn is next

-- Read up to `most` entries of flows that are not in `unwanted`, one of each, among those whose turn is next. Returns their
-- number. `ahead` has no unread entry.
local function read_of_others(turns, q, ahead, group, most, r_prefix, unwanted)
  local found = redis.pcall('ZRANGE', turns.order, 0, MOST_LOOKED_AT - 1, 'WITHSCORES')
  local last, taken = last_read_of(q, group), 0
  for i = 1, found.err and 0 or #found, 2 do
    local kept = taken < most and entry_is_after(found[i], last) and redis.call('XRANGE', q, found[i], found[i])[1]
    local flow = kept and fields_of(kept).f
    if flow and not unwanted[flow] then
      unwanted[flow] = true
      turns.count(move_ahead(q, ahead, found[i], r_prefix))
      turns.read_ahead(1)
      had_turn(turns, {found[i]}, found[i + 1])
      taken = taken + 1
    end
  end
  save_start(turns)
  return taken
end
