-- Common code of EMIT and FINISH (redis_scripts.py): publish messages to gateways, without events of lost requests.
-- A message is (channel, blob, layout). The blob ends with the list of its events; `layout` has for each event the position (from
-- 0) of its request in the call, and its number of bytes, as two 32-bit numbers.
local function list_header(count) -- MessagePack's array header
  if count < 16 then
    return string.char(0x90 + count)
  end
  return count < 65536 and '\220' .. struct.pack('>I2', count) or '\221' .. struct.pack('>I4', count)
end

local function without(lost, blob, layout)
  local count, num_bytes, kept = #layout / 8, 0, {}
  for i = 1, count do
    num_bytes = num_bytes + struct.unpack('>I4', layout, 8 * i - 3)
  end
  local head = string.sub(blob, 1, #blob - num_bytes - #list_header(count))
  local from = #blob - num_bytes + 1
  for i = 1, count do
    local position, length = struct.unpack('>I4I4', layout, 8 * i - 7)
    if not lost[position] then
      kept[#kept + 1] = string.sub(blob, from, from + length - 1)
    end
    from = from + length
  end
  return #kept > 0 and head .. list_header(#kept) .. table.concat(kept)
end

local function publish(first, lost) -- ARGV from `first` on; lost[position]: the request no longer belongs to the caller
  local all = next(lost) == nil
  for i = first, #ARGV, 3 do
    local blob = all and ARGV[i + 1] or without(lost, ARGV[i + 1], ARGV[i + 2])
    if blob then
      redis.call('PUBLISH', ARGV[i], blob)
    end
  end
end

