-- ACCEPT: store a request and queue it. OK means stored; repeated after a lost reply it answers DUP and changes nothing.
-- KEYS  r, j, q
-- ARGV  request id, gateway id, owner key hash, class, cap (-1 = none), body, journal (tokens the client already has, or '')
-- reply {OK|DUP|BUSY, request id}
local r, j, q = KEYS[1], KEYS[2], KEYS[3]
local id, gateway, owner, class, cap, body, journal = unpack(ARGV)

if redis.call('EXISTS', r) == 1 then
  return {'DUP', id}
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
  'state', 'queued', 'attempt', 1, 'strikes', 0, 'jl', #journal, 'solo', '0')
return {'OK', id}
