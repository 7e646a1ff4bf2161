-- Common code of ACCEPT, TAKE, CANCEL, and LEVEL (redis_scripts.py): the number of waiting entries of a queue, in all and by flow.
-- An entry waits until a worker has read it. Its field `f` is its flow, the API key. The hash `times` of a queue has for each flow
-- the start number of its next entry (order.lua), a space, and the number of its waiting entries.
-- Blocking reads and older workers do not update counts, so a count can be too high: ACCEPT limits it to the number of all waiting
-- entries, and TAKE drops all counts if nothing waits. Older gateways write no counts.

local function by_name(list) -- a reply of names and values in turn, as a table
  local found = {}
  for i = 1, #list, 2 do
    found[list[i]] = list[i + 1]
  end
  return found
end

local function num_waiting(q)
  local groups = redis.pcall('XINFO', 'GROUPS', q)
  return math.max(0, redis.call('XLEN', q) - (by_name(groups[1] or {}).pending or 0))
end

local function fields_of(entry)
  return by_name(entry[2] or {})
end

local function flow_of(value) -- start number of the next entry, number of waiting entries
  local start, count = string.match(value or '', '^(%S+) ?(%d*)$')
  return tonumber(start) or 0, tonumber(count) or 0
end

-- Subtract entries that no longer wait. `counts` has their number by flow. `last_start` is the start number of the last read
-- entry (order.lua), or nil.
local function uncount(times, counts, last_start)
  local flows, changed = {''}, {}
  for flow in pairs(counts) do
    flows[#flows + 1] = flow
  end
  local values = (last_start or #flows > 1) and redis.call('HMGET', times, unpack(flows)) or {}
  if last_start and last_start > (tonumber(values[1]) or 0) then
    changed = {'', last_start}
  end
  for i = 2, #flows do
    local value = values[i] or ''
    local space = string.find(value, ' ', 1, true) -- without one it has no count
    if space then
      local count = tonumber(string.sub(value, space + 1)) or 0
      changed[#changed + 1] = flows[i]
      changed[#changed + 1] = string.sub(value, 1, space) .. math.max(0, count - counts[flows[i]])
    end
  end
  if #changed > 0 then
    redis.call('HSET', times, unpack(changed))
  end
end
