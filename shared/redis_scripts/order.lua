-- Put before TAKE (redis_scripts.py): whose turn it is among interactive requests that no worker has read.
-- Start-time fair queueing over the keys that ask (Goyal, Vin and Cheng, 1996; ADR 0159): ACCEPT gives an entry the number at
-- which its key's turn begins, the end of that key's last one or, if that is over, the number of the entry that was read last;
-- the lowest is read next. So a key waits for its own requests and for a fair part of others', however many those are.
-- `order` has these numbers by entry, `times` the ends by key and, under '', the number of the last one read. Both are hints:
-- which requests there are and wait the streams alone say. An entry that is not in `order` has its turn when it is the oldest.
-- A group is read in the order of its stream alone, so a turn before that of older entries is moved to the end of `ahead`, the
-- queue before this one, of which everything has been read.
local MOST_STALE = 256 -- entries that others have read or cancelled, dropped by one call

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

-- These have had their turn, the last of them at `start`.
local function had_turn(order, times, entries, start)
  start = start or redis.call('ZSCORE', order, entries[#entries])
  for i = 1, #entries, 1000 do -- Lua unpacks no more than 8,000
    redis.call('ZREM', order, unpack(entries, i, math.min(i + 999, #entries)))
  end
  if start and tonumber(start) > (tonumber(redis.call('HGET', times, '')) or 0) then
    redis.call('HSET', times, '', start)
  end
end

-- Let an entry be the next one that is read of `ahead`; whether it was there.
local function move_ahead(q, ahead, entry, r_prefix)
  local found = redis.call('XRANGE', q, entry, entry)[1]
  if not found then
    return false
  end
  redis.call('XDEL', q, entry)
  local fields = found[2]
  local id = fields[2] -- 'r' is first
  fields[#fields + 1] = 't'
  fields[#fields + 1] = string.match(entry, '^%d+') -- since when it waits
  local again = redis.call('XADD', ahead, '*', unpack(fields))
  local r = r_prefix .. id
  if redis.pcall('HGET', r, 'entry') == entry then -- else it was accepted anew since, and this entry is worth nothing
    redis.call('HSET', r, 'entry', again)
  end
  return true
end

-- Read up to `most` entries in turn, while `is_enough()` does not hold. `read(stream, count)` returns the ids of those that
-- it has read, `read_on` the same in the stream's order while it is not enough. Returns their number, and whether more may
-- wait; if not, the next turns begin anew.
local function read_in_turn(order, times, q, ahead, group, most, r_prefix, read, read_on, is_enough)
  local num_fields = redis.pcall('HLEN', times)
  if type(num_fields) ~= 'number' then
    num_fields = 0 -- a store whose users may not
  end
  if num_fields <= 2 then -- at most one key: the stream has their order
    local entries = read_on(q, most)
    local may_wait = #entries == most or is_enough()
    if num_fields > 0 and not may_wait then
      redis.call('DEL', order, times)
    elseif num_fields > 0 and #entries > 0 then
      had_turn(order, times, entries)
    end
    return #entries, may_wait
  end
  local last = last_read_of(q, group)
  local taken, stale = 0, 0
  while taken < most and not is_enough() do
    local oldest = oldest_after(q, last)
    if not oldest then
      redis.call('DEL', order, times)
      return taken, false
    end
    local first, start = unpack(redis.call('ZRANGE', order, 0, 0, 'WITHSCORES'))
    if not first or first == oldest or stale == MOST_STALE or not redis.call('ZSCORE', order, oldest) then
      last, taken = oldest, taken + #read(q, 1)
      had_turn(order, times, {oldest})
    elseif entry_is_after(first, last) and move_ahead(q, ahead, first, r_prefix) then
      taken = taken + #read(ahead, 1)
      had_turn(order, times, {first}, start)
    else
      stale = stale + 1
      redis.call('ZREM', order, first)
    end
  end
  return taken, true
end

local MOST_LOOKED_AT = 64 -- entries whose turn is next

local function flow_of(entry)
  local fields = entry and entry[2] or {}
  for f = 1, #fields, 2 do
    if fields[f] == 'f' then
      return fields[f + 1]
    end
  end
end

-- Read up to `most` entries of flows that are not in `unwanted`, one of each, among those whose turn is next. Returns their
-- number. `ahead` has no unread entry.
local function read_of_others(order, times, q, ahead, group, most, r_prefix, unwanted, read)
  local turns = redis.pcall('ZRANGE', order, 0, MOST_LOOKED_AT - 1, 'WITHSCORES')
  local last, taken = last_read_of(q, group), 0
  for i = 1, turns.err and 0 or #turns, 2 do
    local entry, start = turns[i], turns[i + 1]
    local flow = taken < most and entry_is_after(entry, last) and flow_of(redis.call('XRANGE', q, entry, entry)[1])
    if flow and not unwanted[flow] then
      unwanted[flow] = true
      move_ahead(q, ahead, entry, r_prefix)
      taken = taken + #read(ahead, 1)
      had_turn(order, times, {entry}, start)
    end
  end
  return taken
end
