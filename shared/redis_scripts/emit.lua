-- EMIT: one engine step's tokens into the journals, then to the gateways. The step number makes a blind repeat harmless.
-- A request belongs to this worker only while its `worker` field says so: a cancelled one has no hash any more, and one that
-- was accepted anew after a loss of the store has no worker yet. A request moves to another attempt only by REAP, which
-- deletes the fence in the same script; so fence and `worker` together let no token of an old attempt through.
-- KEYS  w, (r, j)...
-- ARGV  worker id, step, a journal frame for each (r, j), then (channel, blob)...
-- reply {FENCED} | {GAP, stored step} | {OK|DUP, positions (from 0) of requests that are no longer this worker's...}
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

local reply = {repeated and 'DUP' or 'OK'}
for i = 1, count do
  local r, j = KEYS[2 * i], KEYS[2 * i + 1]
  -- pcall: a key of the wrong type ends its own request, not the batch
  local mine = redis.pcall('HGET', r, 'worker') == worker
  if mine and not repeated then
    mine = type(redis.pcall('APPEND', j, ARGV[2 + i])) == 'number'
  end
  if not mine then
    reply[#reply + 1] = i - 1
  end
end

if not repeated then
  for i = 3 + count, #ARGV, 2 do
    redis.call('PUBLISH', ARGV[i], ARGV[i + 1])
  end
end
return reply
