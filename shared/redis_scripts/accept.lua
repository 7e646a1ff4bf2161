-- ACCEPT: store the requests of one answer and queue them, all or none. OK means stored; repeated after a lost reply it
-- answers DUP and changes nothing.
-- A request with a record is kept: it has holders, and its state outlives its end (cancel.lua). `i` is its client's name for
-- the answer, which is that of the first request: SAME if it already names another than `stale`, which the caller knows to be
-- over for good. The name lives as long as the answer can be given: prolong.lua sees to that.
-- With a limit, `a` is the account of their key (account.lua): FULL if it would hold more than that.
-- With a flow they get turns among the requests of other flows (order.lua), each by what it costs.
-- KEYS  q, i (or the first r again), a (or the first r), order, times (or the first r twice), (r, j)...
-- ARGV  gateway id, owner key hash, class, cap (-1 = none), fingerprint (or '' without i), stale id, seconds to keep i,
--       limit of a in bytes (or ''), seconds to keep a, bytes of a request beside its own, prefixes of r and of j, flow
--       (or ''), then (request id, body, journal (tokens the client already has, or ''), record or '', holder, grace
--       seconds, bytes that it may write, tokens of its prompt (0: nobody says), its cost in tokens) for each (r, j)
-- reply {OK|DUP|BUSY|FULL, first request id} | {SAME, first request id, the other's id, its fingerprint}
local q, i = KEYS[1], KEYS[2]
local gateway, owner, class, cap, fingerprint, stale, keep_seconds = unpack(ARGV, 1, 7)
local limit, account_seconds, bare_bytes, r_prefix, j_prefix, flow = unpack(ARGV, 8, 13)
local order, times = KEYS[4], KEYS[5]
local first, count = ARGV[14], (#KEYS - 5) / 2

if redis.call('EXISTS', KEYS[6]) == 1 then
  return {'DUP', first}
end
if fingerprint ~= '' then
  local named = redis.call('HMGET', i, 'id', 'fingerprint')
  if named[1] and named[1] ~= stale then
    return {'SAME', first, named[1], named[2]}
  end
end
if tonumber(cap) >= 0 then
  local queued = redis.call('XLEN', q)
  -- More requests than the cap has places are taken by an empty queue, or they never would be.
  if queued >= tonumber(cap) or (queued > 0 and queued + count > tonumber(cap)) then
    return {'BUSY', first}
  end
end
local account = limit ~= '' and open_account(KEYS[3], r_prefix, j_prefix, tonumber(bare_bytes))
if account then
  local entries, new = {}, 0
  for n = 1, count do
    local id, body, journal, record, _, _, reserved = unpack(ARGV, 5 + 9 * n, 11 + 9 * n)
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
local now, start = 0, 0
local num_turns = flow ~= '' and redis.pcall('ZCARD', order)
if type(num_turns) ~= 'number' then -- a store whose users may not: requests are read as they come, as before
  flow = ''
elseif num_turns > redis.call('XLEN', q) then -- of entries that are gone, as no worker looks at them
  redis.call('DEL', order, times)
end
if flow ~= '' then
  local known = redis.call('HMGET', times, '', flow)
  now = tonumber(known[1]) or 0
  start = math.max(now, tonumber(known[2]) or 0)
end
for n = 1, count do
  local r, j = KEYS[4 + 2 * n], KEYS[5 + 2 * n]
  local id, body, journal, record, holder, grace, _, prompt, cost = unpack(ARGV, 5 + 9 * n, 13 + 9 * n)
  local fields = {'r', id, 's', '0'}
  if prompt ~= '0' then
    fields[#fields + 1], fields[#fields + 2] = 'p', prompt
  end
  if flow ~= '' then
    fields[#fields + 1], fields[#fields + 2] = 'f', flow
  end
  local entry = redis.call('XADD', q, '*', unpack(fields))
  if flow ~= '' then
    redis.call('ZADD', order, start, entry)
    start = start + tonumber(cost)
  end
  if journal == '' then
    redis.call('DEL', j)
  else
    redis.call('SET', j, journal)
  end
  redis.call('HSET', r, 'body', body, 'gateway', gateway, 'owner', owner, 'class', class, 'entry', entry,
    'state', 'queued', 'attempt', 1, 'strikes', 0, 'jl', #journal, 'solo', '0', 'grace', grace)
  if record ~= '' then
    redis.call('HSET', r, 'record', record, 'h:' .. holder, gateway)
  end
end
if flow ~= '' then
  redis.call('HSET', times, '', now, flow, start)
end
if fingerprint ~= '' then
  redis.call('HSET', i, 'id', first, 'fingerprint', fingerprint)
  redis.call('EXPIRE', i, keep_seconds)
end
return {'OK', first}
