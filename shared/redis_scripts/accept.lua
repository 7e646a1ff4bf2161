-- ACCEPT: store the requests of one answer and queue them, all or none. A repeated call replies DUP and changes nothing.
-- A request with a record is kept: it has holders, and its state outlives its end (cancel.lua). `i` is the client's name for
-- the answer, that of the first request: SAME if it already names another request than `stale`, which the caller knows to be
-- gone. prolong.lua extends the life of the name.
-- With a limit, `a` is the account of the API key (account.lua): FULL if it would exceed the limit.
-- The cap counts waiting requests. With a flow and `multiple`, a flow may hold `multiple` times the free places
-- (shared/shares.py): SHARE if it would hold more.
-- With `most_ahead`, LATE if more requests would be served before them. Later requests of other flows may overtake them.
-- Requests with a cost are ordered among those of other flows (order.lua). The homes of their prefixes (homes.lua) are woken, and
-- for requests without a home the least loaded workers.
-- KEYS  q, i (or the first r again), a (or the first r), order, times, homes, (r, j)...
-- ARGV  gateway id, owner key hash, class, cap (-1 = none), fingerprint (or '' without i), stale id, seconds to keep i,
--       limit of a in bytes (or ''), seconds to keep a, bytes of a request besides its content, prefixes of r and of j, flow
--       (or ''), multiple (or ''), prefix of the control channels (or '': wake nobody), held (an argument: gateways may not write
--       it), then (request id, body, journal (tokens the client already has, or ''), record or '', holder, grace
--       seconds, bytes that it may write, tokens of its prompt (0: unknown), its cost (or ''), its needs (0: none), tokens of
--       its context (0: unknown), the key of its prefix (or '')) for each (r, j), then most_ahead (-1: no limit)
-- reply {OK|DUP|BUSY|FULL, first request id} | {SHARE, first request id, places that the flow may hold}
--       | {LATE, first request id, requests before it}
--       | {SAME, first request id, id of the other request, its fingerprint}
local q, i = KEYS[1], KEYS[2]
local gateway, owner, class, cap, fingerprint, stale, keep_seconds = unpack(ARGV, 1, 7)
local limit, account_seconds, bare_bytes, r_prefix, j_prefix, flow, multiple = unpack(ARGV, 8, 14)
local channel_prefix, held_by_worker = ARGV[15], ARGV[16]
local order, times, homes = KEYS[4], KEYS[5], KEYS[6]
local first, count = ARGV[17], (#KEYS - 6) / 2
local most_ahead = tonumber(ARGV[#ARGV])

if redis.call('EXISTS', KEYS[7]) == 1 then
  return {'DUP', first}
end
if fingerprint ~= '' then
  local named = redis.call('HMGET', i, 'id', 'fingerprint')
  if named[1] and named[1] ~= stale then
    return {'SAME', first, named[1], named[2]}
  end
end
local queued = redis.call('XLEN', q) -- includes entries that workers have read; the exact number is computed only if needed
local now, start, held = 0, 0, 0
if flow ~= '' and queued > 0 then
  local known = redis.call('HMGET', times, '', flow)
  now, start, held = tonumber(known[1]) or 0, flow_of(known[2])
  start = math.max(now, start)
end

-- Return the reason of a refusal or nil, and the places that the flow may hold.
local function refusal()
  local free, share = tonumber(cap) - queued, math.huge
  if flow ~= '' and multiple ~= '' then
    share = math.max(0, tonumber(multiple) * free)
  end
  -- An empty queue accepts an answer with more requests than places; otherwise it would never fit.
  if queued > 0 and held + count > share and (held > 0 or count <= free) then
    return 'SHARE', math.floor(share)
  end
  return (free <= 0 or (queued > 0 and count > free)) and 'BUSY' or nil
end

if tonumber(cap) >= 0 and refusal() then
  queued = num_waiting(q)
  held = math.min(held, queued)
  local reason, share = refusal()
  if reason then
    return {reason, first, share}
  end
end
if most_ahead >= 0 and queued > most_ahead then
  local ahead = num_waiting(q)
  if flow ~= '' then
    local in_turn = redis.pcall('ZCOUNT', order, '-inf', string.format('(%.17g', start)) -- users of an older release may not
    ahead = type(in_turn) == 'number' and math.min(ahead, in_turn) or ahead
  end
  if ahead > most_ahead then
    return {'LATE', first, ahead}
  end
end
local account = limit ~= '' and open_account(KEYS[3], r_prefix, j_prefix, tonumber(bare_bytes))
if account then
  local entries, new = {}, 0
  for n = 1, count do
    local id, body, journal, record, _, _, reserved = unpack(ARGV, 5 + 12 * n, 11 + 12 * n)
    local own = #body + #record + bare_bytes
    local counted = own + math.max(tonumber(reserved), #journal)
    entries[n] = {id, own, reserved, counted}
    new = new + counted
  end
  local has_room = account.has_room(new, tonumber(limit))
  for n = 1, has_room and count or 0 do
    account.add(unpack(entries[n]))
  end
  account.save(account_seconds)
  if not has_room then
    return {'FULL', first}
  end
end

-- The users of an older release may not read `held`.
local can_wake = channel_prefix ~= '' and type(redis.pcall('ZCARD', held_by_worker)) == 'number'
local woken, num_homes = {}, 0

for n = 1, count do
  local r, j = KEYS[5 + 2 * n], KEYS[6 + 2 * n]
  local id, body, journal, record, holder, grace, _, prompt, cost, needs, context, prefix = unpack(ARGV, 5 + 12 * n, 16 + 12 * n)
  local fields = {'r', id, 's', '0'}
  if prompt ~= '0' then
    fields[5], fields[6], fields[7], fields[8] = 'p', prompt, 'l', context
  end
  if needs ~= '0' then
    fields[#fields + 1], fields[#fields + 2] = 'n', needs
  end
  if flow ~= '' then
    fields[#fields + 1], fields[#fields + 2] = 'f', flow
  end
  local is_in_turn = flow ~= '' and cost ~= ''
  local home = is_in_turn and can_wake and home_of(homes, prefix)
  if prefix ~= '' then
    fields[#fields + 1], fields[#fields + 2] = 'k', prefix
  end
  if can_wake then
    fields[#fields + 1], fields[#fields + 2] = 'h', home or ''
  end
  local entry = redis.call('XADD', q, '*', unpack(fields))
  if queued == 0 and n == 1 then -- after a write: a full store lets only scripts that have written continue to write
    redis.call('DEL', order, times)
  end
  if is_in_turn then
    redis.pcall('ZADD', order, start, entry) -- without permission, requests are read in order of arrival
    if home then
      redis.call('ZADD', home_key(order, home), start, entry)
      redis.call('EXPIRE', home_key(order, home), HOME_SECONDS)
      num_homes = num_homes + 1
      if not woken[home] and load_of(held_by_worker, home) then
        woken[home] = true
        redis.call('PUBLISH', channel_prefix .. home, '')
      end
    end
    start = start + tonumber(cost)
  end
  if journal == '' then
    redis.call('DEL', j)
  else
    redis.call('SET', j, journal)
  end
  redis.call('HSET', r, 'body', body, 'gateway', gateway, 'owner', owner, 'class', class, 'entry', entry,
    'state', 'queued', 'attempt', 1, 'strikes', 0, 'jl', #journal, 'solo', '0', 'grace', grace,
    'context', context)
  if needs ~= '0' then
    redis.call('HSET', r, 'needs', needs)
  end
  if record ~= '' then
    redis.call('HSET', r, 'record', record, 'h:' .. holder, gateway)
  end
end
if flow ~= '' then
  redis.call('HSET', times, '', now, flow, start .. ' ' .. held + count)
  if num_homes > 0 then
    redis.call('HSET', times, 'homes', 1) -- TAKE must compare homes
  end
end
if can_wake then
  wake(held_by_worker, channel_prefix, count - num_homes, woken)
end
if fingerprint ~= '' then
  redis.call('HSET', i, 'id', first, 'fingerprint', fingerprint)
  redis.call('EXPIRE', i, keep_seconds)
end
return {'OK', first}
