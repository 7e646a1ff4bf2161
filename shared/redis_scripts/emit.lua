-- EMIT: append one engine step's tokens to the journals, then publish them. The step number makes a repeated call harmless.
-- A request belongs to this worker while its `claim` names the worker and the entry of the worker's claim. A cancelled request
-- has no claim, and one that was accepted again has another entry. REAP begins another attempt, and deletes the fence in the same
-- script. If a failover lost the delivery of the entry, the next worker replaces the claim. So no token of an old attempt reaches
-- the journal or a gateway. The claim is one field, because a second one costs the store 2 us per token.
-- KEYS  w, (r, j)...
-- ARGV  worker id, step, (entry id, journal frame) for each (r, j), then messages (publish.lua)
-- reply {FENCED} | {GAP, stored step} | {OK|DUP, positions (from 0) of requests that no longer belong to this worker...}
local worker, step = ARGV[1], tonumber(ARGV[2])
local count = (#KEYS - 1) / 2

local stored = tonumber(redis.call('GET', KEYS[1]))
if not stored then
  return {'FENCED'}
end
local repeated = stored == step
if not repeated and stored ~= step - 1 then
  return {'GAP', stored}
end
if not repeated then
  redis.call('SET', KEYS[1], step)
end

local reply, lost = {repeated and 'DUP' or 'OK'}, {}
for i = 1, count do
  local r, j, entry = KEYS[2 * i], KEYS[2 * i + 1], ARGV[1 + 2 * i]
  -- pcall: a key of the wrong type ends its own request, not the batch
  local mine = redis.pcall('HGET', r, 'claim') == claim_of(worker, entry)
  if mine and not repeated then
    mine = type(redis.pcall('APPEND', j, ARGV[2 + 2 * i])) == 'number'
  end
  if not mine then
    reply[#reply + 1] = i - 1
    lost[i - 1] = true
  end
end

if not repeated then
  publish(3 + 2 * count, lost)
end
return reply
