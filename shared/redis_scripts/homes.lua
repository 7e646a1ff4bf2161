-- Common code of the scripts that queue entries, of TAKE, and of CLAIM: wake-ups of workers, and homes of entries.
-- A worker with room waits for a message in its control channel, then calls TAKE. A lost message costs at most a second, because
-- an idle worker calls TAKE once a second anyway. `held` is the set of workers with room, by number of requests.
-- The home of a prefix is the worker that last claimed a request with this prefix: its cache probably has it. `homes` is a table of
-- NUM_SLOTS values "prefix key, home", in which a prefix replaces another one of its slot, so its memory is bounded: 5 MB.
-- An entry's field `h` is its home when it was accepted, empty if it has none; an entry of a gateway that wakes nobody lacks the
-- field. The start numbers of a home's entries (order.lua) are also in a set of its own. It may have entries that are gone, so it
-- expires if its worker is.
local QUANTUM, QUANTUM_RATIO = 2, 8
local HOME_QUANTUM, HOME_QUANTUM_RATIO = 6, 4
local NUM_SLOTS, HOME_SECONDS = 32768, 3600

-- The requests that a worker may hold if the least loaded worker with room holds `lowest`. A home may hold more of its entries.
local function allowed_beside(lowest, is_home)
  local quantum, ratio = is_home and HOME_QUANTUM or QUANTUM, is_home and HOME_QUANTUM_RATIO or QUANTUM_RATIO
  return lowest + math.max(quantum, math.floor(lowest / ratio))
end

local function home_key(order, worker)
  return order .. ':' .. worker
end

local function load_of(held, worker) -- nil: it has no room, or the store's user has no permission
  local load = redis.pcall('ZSCORE', held, worker)
  return type(load) == 'string' and tonumber(load) or nil
end

local function slot_of(prefix_key) -- hexadecimal digits of a hash
  return tonumber(string.sub(prefix_key, 1, 8), 16) % NUM_SLOTS
end

local function home_of(homes, prefix_key)
  local found = prefix_key ~= '' and redis.call('HGET', homes, slot_of(prefix_key)) or ''
  local known, worker = string.match(found, '^(%S+) (%S+)$')
  return known == prefix_key and worker or nil
end

local function settle(homes, prefix_key, worker)
  redis.call('HSET', homes, slot_of(prefix_key), prefix_key .. ' ' .. worker)
end

-- Wake the least loaded workers with room that are not in `woken`: `count`, and one more, because a stopped worker may be among
-- them.
local function wake(held, channel_prefix, count, woken)
  count = count + 1
  local num_known = 0
  for _ in pairs(woken) do
    num_known = num_known + 1
  end
  for _, worker in ipairs(redis.pcall('ZRANGE', held, 0, count + num_known - 1)) do
    if count > 0 and not woken[worker] then
      woken[worker] = true
      count = count - 1
      redis.pcall('PUBLISH', channel_prefix .. worker, '')
    end
  end
end

