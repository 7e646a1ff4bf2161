-- ACCEPT: store a request and queue it. OK means stored; repeated after a lost reply it answers DUP and changes nothing.
-- A request with a record is kept: it has holders, and its state outlives its end (cancel.lua). `i` is its client's name for
-- it: SAME if that already names another request than `stale`, which the caller knows to be gone.
-- KEYS  r, j, q, i (or r again)
-- ARGV  request id, gateway id, owner key hash, class, cap (-1 = none), body, journal (tokens the client already has, or ''),
--       record or '', holder, grace seconds, fingerprint (or '' without i), stale id, seconds to keep i
-- reply {OK|DUP|BUSY, request id} | {SAME, request id, the other's id, its fingerprint}
local r, j, q, i = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, gateway, owner, class, cap, body, journal, record, holder, grace, fingerprint, stale, keep_seconds = unpack(ARGV)

if redis.call('EXISTS', r) == 1 then
  return {'DUP', id}
end
if fingerprint ~= '' then
  local named = redis.call('HMGET', i, 'id', 'fingerprint')
  if named[1] and named[1] ~= stale then
    return {'SAME', id, named[1], named[2]}
  end
end
if tonumber(cap) >= 0 and redis.call('XLEN', q) >= tonumber(cap) then
  return {'BUSY', id}
end
local entry = redis.call('XADD', q, '*', 'r', id, 'a', '1', 's', '0')
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
if fingerprint ~= '' then
  redis.call('HSET', i, 'id', id, 'fingerprint', fingerprint)
  redis.call('EXPIRE', i, keep_seconds)
end
return {'OK', id}
