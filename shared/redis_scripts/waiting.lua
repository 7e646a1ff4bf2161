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

-- Subtract entries that no longer wait. `counts` has their number by flow.
local function uncount(times, counts)
  local flows, changed = {}, {}
  for flow in pairs(counts) do
    flows[#flows + 1] = flow
  end
  local values = #flows > 0 and redis.call('HMGET', times, unpack(flows)) or {}
  for i, flow in ipairs(flows) do
    if values[i] then
      local start, count = flow_of(values[i])
      changed[#changed + 1] = flow
      changed[#changed + 1] = start .. ' ' .. math.max(0, count - counts[flow])
    end
  end
  if #changed > 0 then
    redis.call('HSET', times, unpack(changed))
  end
end
