-- Common code: entry ids, which become larger each time a request is queued again.
-- Streams number their entries independently, so in one millisecond two streams can give one id. CLAIM, EMIT, and FINISH
-- distinguish the times that a request was queued by the entry id alone.
local function numbers_of(entry)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end

local function entry_is_after(entry, other)
  local ms, number = numbers_of(entry)
  local other_ms, other_number = numbers_of(other)
  return ms > other_ms or ms == other_ms and number > other_number
end

-- Add an entry with a larger id than `earlier`, the last entry of its request. Returns the id.
local function add_after(earlier, stream, fields)
  local entry = redis.call('XADD', stream, '*', unpack(fields))
  if earlier and not entry_is_after(entry, earlier) then
    redis.call('XDEL', stream, entry)
    local ms, number = numbers_of(earlier)
    entry = redis.call('XADD', stream, string.format('%.0f-%.0f', ms, number + 1), unpack(fields))
  end
  return entry
end

