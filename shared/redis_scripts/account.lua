-- Common code of ACCEPT (redis_scripts.py): the bytes that all requests of an API key hold in the store.
-- An account is a hash: the sum (`bytes`), and a queue of entries "request id, own bytes, bytes that it may still write, bytes
-- that count", by number from `first` to `next`. Ends and expirations are not reported to it. Instead the oldest entries, which
-- are likely to be gone, are checked: a chunk with every CHUNK-th new entry, and more if the sum is at the limit. So lost
-- updates are corrected. An account expires after a long silence of its key.
local CHUNK = 16 -- checking a chunk of expired entries takes three commands
local MAX_LOOKS = 160 -- checks of existing requests per new one; an expired chunk counts as one

local function open_account(key, r_prefix, j_prefix, bare_bytes)
  local stored = redis.call('HMGET', key, 'bytes', 'first', 'next')
  local bytes, first, next_ = tonumber(stored[1]) or 0, tonumber(stored[2]) or 0, tonumber(stored[3]) or 0
  local last, is_new, added = next_, not stored[1], {}

  local function add(id, own, reserved, counted)
    added[#added + 1] = next_
    added[#added + 1] = table.concat({id, own, reserved, counted}, ' ')
    next_ = next_ + 1
    bytes = bytes + counted
  end

  -- Count a request again, at the end of the queue, if it exists.
  local function weigh(id, own, reserved)
    local request = redis.call('HMGET', r_prefix .. id, 'state', 'owner')
    if request[1] then
      local written = redis.call('STRLEN', j_prefix .. id)
      own = request[2] and own or bare_bytes -- without an owner its content was erased
      reserved = request[1] == 'done' and 0 or reserved
      add(id, own, reserved, own + math.max(reserved, written))
    end
  end

  -- Check a chunk of the oldest entries that existed before this call. Returns the number of checks.
  local function look()
    local numbers, requests, entries = {}, {}, {}
    for number = first, math.min(first + CHUNK, last) - 1 do
      numbers[#numbers + 1] = number
    end
    for _, entry in ipairs(redis.call('HMGET', key, unpack(numbers))) do
      local id, own, reserved, counted = string.match(entry or '', '^(%S+) (%S+) (%S+) (%S+)$')
      if id then
        entries[#entries + 1] = {id, tonumber(own), tonumber(reserved)}
        requests[#requests + 1] = r_prefix .. id
        bytes = bytes - counted
      end
    end
    redis.call('HDEL', key, unpack(numbers))
    first = first + #numbers
    if #requests == 0 or redis.call('EXISTS', unpack(requests)) == 0 then
      return 1
    end
    for _, entry in ipairs(entries) do
      weigh(unpack(entry))
    end
    return #entries
  end

  -- Return whether `new` bytes fit in the limit. A key without other requests may exceed it.
  local function has_room(new, limit)
    local looks = MAX_LOOKS
    if last % CHUNK == 0 and first < last then
      looks = looks - look()
    end
    while bytes > 0 and bytes + new > limit and first < last and looks > 0 do
      looks = looks - look()
    end
    return bytes == 0 or bytes + new <= limit
  end

  local function save(seconds)
    redis.call('HSET', key, 'bytes', bytes, 'first', first, 'next', next_, unpack(added))
    if is_new or last % CHUNK == 0 then
      redis.call('EXPIRE', key, seconds)
    end
  end

  return {add = add, has_room = has_room, save = save}
end
