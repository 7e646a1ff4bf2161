-- GONE: a page of a queue: its requests whose gateway does not listen to its channel. It changes nothing.
-- KEYS  queue
-- ARGV  start of the page as in XRANGE, entries of a page, prefix of r, prefix of the gateway channels
-- reply {length of the queue, last entry, {request id, gateway, grace, class}...}; the last entry is '' if no page follows
local page = redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])
local reply = {redis.call('XLEN', KEYS[1]), #page == tonumber(ARGV[2]) and page[#page][1] or ''}
local listeners = {}
for _, entry in ipairs(page) do
  local id
  for f = 1, #entry[2], 2 do
    id = entry[2][f] == 'r' and entry[2][f + 1] or id
  end
  local request = id and redis.pcall('HMGET', ARGV[3] .. id, 'gateway', 'grace', 'class') or {}
  local gateway, class = request[1], request[3]
  if not request.err and gateway and gateway ~= '' and class then
    listeners[gateway] = listeners[gateway] or redis.call('PUBSUB', 'NUMSUB', ARGV[4] .. gateway)[2]
    if listeners[gateway] == 0 then
      reply[#reply + 1] = {id, gateway, request[2], class}
    end
  end
end
return reply
