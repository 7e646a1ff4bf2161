-- Common code of TAKE (redis_scripts.py): the order of waiting interactive requests.
-- Start-time fair queueing over API keys (Goyal, Vin and Cheng, 1996; ADR 0159). ACCEPT gives an entry a start number: the end of
-- its key's last entry, or the start of the last read entry if that is larger. The lowest start is read next. So a key waits for
-- its own requests and for a fair part of others', regardless of their number.
-- `order` contains the start by entry, `times` the end by key and, under '', the start of the last read entry. Both are hints; the
-- streams define which requests wait. An entry that is not in `order` is read when it is the oldest.
-- A consumer group reads a stream in its order only. An entry that is next before older entries is moved to the end of `ahead`,
-- the queue before this one, all of whose entries have been read.
-- A worker reads the entries whose home it is (homes.lua) before others whose start is at most WINDOW_TOKENS lower: keys still get
-- their turns. It leaves other homes' entries to them for LEFT_MS. A long prompt is left for about as long as this worker would
-- compute it, at most MAX_LEFT_MS. It does not wait for a home without room, or with more requests than it may have beside this
-- worker.
local WINDOW_TOKENS = 16384
local LEFT_MS, LEFT_MS_PER_TOKEN, MAX_LEFT_MS = 20, 0.025, 500 -- 8B parameters on an H100: 8,192 tokens in 0.2 s
local MAX_STALE = 256 -- maximum of entries that were read or cancelled meanwhile, and are dropped by one call

-- Return the last entry of a queue that was read, and the number of entries that were read and are not acknowledged.
local function last_read_of(q, group)
  local groups = redis.pcall('XINFO', 'GROUPS', q)
  for _, found in ipairs(groups.err and {} or groups) do
    local info = by_name(found)
    if info.name == group then
      return info['last-delivered-id'], info.pending
    end
  end
  return '0-0', 0
end

local function oldest_after(q, entry)
  local found = redis.call('XRANGE', q, '(' .. entry, '+', 'COUNT', 1)[1]
  return found and found[1]
end

local MAX_UNPACKED = 1000 -- Lua unpacks no more than 8,000

local function remove_all(key, entries)
  for i = 1, #entries, MAX_UNPACKED do
    redis.call('ZREM', key, unpack(entries, i, math.min(i + MAX_UNPACKED - 1, #entries)))
  end
end

-- Let the next entries of all flows start at `start` or later. save_turns() removes the entry from `order`.
local function had_turn(turns, entry, start)
  turns.gone[#turns.gone + 1] = entry
  turns.gone[entry] = true
  turns.start = math.max(turns.start or 0, tonumber(start) or 0)
end

-- Let save_turns() remove an entry from the set of its home.
local function leave_home(turns, entry, home)
  if home and home ~= '' then
    turns.left[home] = turns.left[home] or {}
    table.insert(turns.left[home], entry)
  end
end

local function save_turns(turns)
  remove_all(turns.order, turns.gone)
  for home, entries in pairs(turns.left) do
    remove_all(home_key(turns.order, home), entries)
  end
  turns.gone, turns.left = {}, {}
end

local PAGE = 8

-- Return a function that gives the first entry of `order` or of a home that is not in `turns.gone`, and its start number. It reads
-- a page at a time, so no entry may be removed from the set meanwhile.
local function entries_in_order(turns, key)
  local page, i, num_read = {}, 1, 0
  return function()
    while true do
      if i > #page then
        if num_read > 0 and #page < 2 * PAGE then
          return nil
        end
        page, i = redis.call('ZRANGE', key, num_read, num_read + PAGE - 1, 'WITHSCORES'), 1
        num_read = num_read + PAGE
      elseif turns.gone[page[i]] then
        i = i + 2
      else
        return page[i], page[i + 1]
      end
    end
  end
end

-- Return the next entry for this worker and its start number, and whether the worker is its home.
local function next_in_turn(turns)
  local first, start = turns.next_of_all()
  if not turns.has_homes then
    return first, start, false
  end
  local own, own_start = turns.next_of_home()
  if own and (not start or tonumber(own_start) - tonumber(start) <= WINDOW_TOKENS) then
    return own, own_start, true
  end
  return first, start, false
end

local function milliseconds_since(entry)
  local now = redis.pcall('TIME') -- without permission, no entry is left to its home
  return now.err and math.huge or now[1] * 1000 + now[2] / 1000 - numbers_of(entry)
end

local function is_left_to_home(turns, entry)
  local fields = fields_of(entry)
  local home = fields.h or ''
  if home == '' or home == turns.worker then
    return false
  end
  local left_ms = math.max(LEFT_MS, math.min(MAX_LEFT_MS, (tonumber(fields.p) or 0) * LEFT_MS_PER_TOKEN))
  local load = load_of(turns.held, home)
  return load and load < allowed_beside(turns.load(), true) and milliseconds_since(entry[1]) < left_ms
end

-- Return an entry of `q`, or nil if it is gone or was read before `last`.
local function unread(q, entry, last)
  return entry_is_after(entry, last) and redis.call('XRANGE', q, entry, entry)[1] or nil
end

-- Add a copy of an entry to the end of `ahead`; the caller removes the entry. Returns its fields.
local function move_ahead(turns, ahead, found, r_prefix)
  local entry, list, fields = found[1], found[2], fields_of(found)
  leave_home(turns, entry, fields.h)
  local r = r_prefix .. list[2] -- 'r' is first
  list[#list + 1] = 't'
  list[#list + 1] = string.match(entry, '^%d+') -- time of queueing
  local again = add_after(entry, ahead, list)
  if redis.pcall('HGET', r, 'entry') == entry then -- otherwise it was accepted again, and this entry is ignored
    redis.call('HSET', r, 'entry', again)
  end
  return fields
end

-- Read up to `limit` entries in fair order, or up to `home_limit` if the further ones have their home here, until
-- `turns.is_enough()`. `turns.read(stream, count)` reads, counts, and returns
-- entry ids; `turns.read_on` does so in the stream's order until it is enough. `turns.count(fields)` counts an entry that is
-- moved ahead, and `turns.read_ahead(count)` reads those. Returns the number of entries, and whether more may wait; if not, the
-- start numbers are reset.
local function read_in_turn(turns, q, ahead, group, limit, home_limit, r_prefix)
  local order, times = turns.order, turns.times
  local num_fields = redis.pcall('HLEN', times)
  if type(num_fields) ~= 'number' then
    num_fields = 0 -- the store's user has no permission
  end
  if num_fields <= 2 then -- at most one key: the stream's order is right
    local entries = limit > 0 and turns.read_on(q, limit) or {}
    local may_wait = #entries >= limit or turns.is_enough()
    if num_fields > 0 and not may_wait then
      redis.call('DEL', order, times)
    elseif num_fields > 0 and #entries > 0 then
      local start = redis.call('ZSCORE', order, entries[#entries])
      for _, entry in ipairs(entries) do
        had_turn(turns, entry, start)
      end
      save_turns(turns)
    end
    return #entries, may_wait
  end
  turns.has_homes = redis.call('HGET', times, 'homes')
  turns.next_of_all = entries_in_order(turns, order)
  turns.next_of_home = entries_in_order(turns, home_key(order, turns.worker))
  local last, num_pending = last_read_of(q, group)
  local num_waiting, oldest = redis.call('XLEN', q) - num_pending, nil
  local oldest_start -- false: it has no start number
  local taken, stale = 0, 0
  local moved, moved_fields = {}, {} -- taken entries of `q`, whose copies at the end of `ahead` are not read yet

  local function read_moved()
    if #moved > 0 then
      redis.call('XDEL', q, unpack(moved))
      turns.read_ahead(moved_fields)
      moved, moved_fields = {}, {}
    end
  end

  while taken < home_limit and not turns.is_enough() do
    if not oldest then
      oldest = oldest_after(q, last)
      if not oldest then
        read_moved()
        redis.call('DEL', order, times)
        turns.gone, turns.start = {}, nil
        return taken, false
      end
      oldest_start = redis.call('ZSCORE', order, oldest)
    end
    local first, start, is_own = next_in_turn(turns)
    local reads_oldest = first == oldest or not oldest_start or stale == MAX_STALE
    local found = (turns.has_homes or not reads_oldest) and unread(q, reads_oldest and oldest or first, last)
    turns.has_left = found and turns.has_homes and is_left_to_home(turns, found)
    if turns.has_left or (taken >= limit and not is_own) then
      break
    elseif reads_oldest then
      read_moved()
      taken = taken + #turns.read(q, 1)
      had_turn(turns, oldest, oldest_start)
      last, oldest = oldest, nil
    elseif found then
      local fields = move_ahead(turns, ahead, found, r_prefix)
      turns.count(fields)
      taken = taken + 1
      table.insert(moved, first)
      table.insert(moved_fields, fields)
      had_turn(turns, first, start)
      if #moved == MAX_UNPACKED then
        read_moved()
      end
    else
      stale = stale + 1
      had_turn(turns, first, 0)
      leave_home(turns, first, is_own and turns.worker)
    end
  end
  read_moved()
  turns.num_left = num_waiting - taken
  save_turns(turns)
  return taken, true
end

local MAX_EXAMINED = 64 -- entries with the lowest start numbers

-- Read one entry each of up to `limit` flows that are not in `unwanted`, among those with the lowest start numbers. Returns
-- their number. `ahead` must have no unread entry.
local function read_of_others(turns, q, ahead, group, limit, r_prefix, unwanted)
  local found = redis.pcall('ZRANGE', turns.order, 0, MAX_EXAMINED - 1, 'WITHSCORES')
  local last, taken = last_read_of(q, group), 0
  for i = 1, found.err and 0 or #found, 2 do
    local kept = taken < limit and unread(q, found[i], last)
    local flow = kept and fields_of(kept).f
    if flow and not unwanted[flow] then
      unwanted[flow] = true
      local fields = move_ahead(turns, ahead, kept, r_prefix)
      turns.count(fields)
      redis.call('XDEL', q, found[i])
      turns.read_ahead({fields})
      had_turn(turns, found[i], found[i + 1])
      taken = taken + 1
    end
  end
  save_turns(turns)
  return taken
end
