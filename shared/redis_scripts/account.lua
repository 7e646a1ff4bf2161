-- Put before ACCEPT (redis_scripts.py): how many bytes the requests of one key hold in the store, all together.
-- An account is a hash: their sum (`bytes`), and a queue of entries "request id, bytes of it, bytes it may still write, bytes
-- that it counts for", by number, with the numbers of its `first` and its `next` one. Nobody tells an account that a request
-- has ended, was forgotten or has expired: of the oldest entries, which are likely to be gone, a chunk is looked at with every
-- CHUNK-th new one, and more where the sum is at the limit. So it mends itself, whatever was lost. It is forgotten when its
-- key is silent for long.
local CHUNK = 16 -- what is gone together costs three commands, whatever their number
local MAX_LOOKS = 160 -- at requests that are there, for one new one; a chunk that is gone counts as one

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

  -- Counted anew at the end of the queue, if it is there.
  local function weigh(id, own, reserved)
    local request = redis.call('HMGET', r_prefix .. id, 'state', 'owner')
    if request[1] then
      local written = redis.call('STRLEN', j_prefix .. id)
      own = request[2] and own or bare_bytes -- without an owner its content was erased
      reserved = request[1] == 'done' and 0 or reserved
      add(id, own, reserved, own + math.max(reserved, written))
    end
  end

  -- The oldest entries of those that were there in the beginning; how many looks it took.
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

  -- Whether so many bytes more stay within the limit. Who holds nothing else may be beyond it.
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
