-- Common code: entry ids, which become larger each time a request is queued again.
-- Streams number their entries independently, so in one millisecond two streams can give one id. CLAIM, EMIT, and FINISH
-- distinguish the times that a request was queued by the entry id alone.
local function numbers_of(entry)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end

-- Compare ids as strings: their numbers have no leading zeros, so the one with more digits is larger.
local function entry_is_after(entry, other)
  local dash, other_dash = string.find(entry, '-', 1, true), string.find(other, '-', 1, true)
  if dash ~= other_dash then
    return dash > other_dash
  end
  if #entry ~= #other and string.sub(entry, 1, dash) == string.sub(other, 1, dash) then
    return #entry > #other
  end
  return entry > other
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

