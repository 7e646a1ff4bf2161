-- REGISTER: make a worker incarnation known: its fence, the groups, and its consumers. Its id is new, so a repeated call is
-- harmless. The consumers are created here instead of by the first read, so that REAP finds a worker that dies before it.
-- All workers of a queue serve one model: `model` contains its identity (model_identity.py). It is written if it is absent, or if
-- no worker lives and no request waits; otherwise a worker with another value of a field is refused. Without a worker id the
-- fields are only compared.
-- KEYS  w, model, q...
-- ARGV  group, worker id or '', prefix of w, then (field, value)...
-- reply {OK} | {DIFFERS, field, its stored value, requests in the queues, ids of workers with a fence...}
local group, worker, w_prefix = ARGV[1], ARGV[2], ARGV[3]

local function first_difference(fields)
  for f = 1, #fields, 2 do
    local stored = redis.call('HGET', KEYS[2], fields[f])
    if stored and stored ~= fields[f + 1] then
      return {'DIFFERS', fields[f], stored}
    end
  end
end

local function live_workers()
  local live = {}
  for i = 3, #KEYS do
    local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[i], group)
    for _, consumer in ipairs(consumers.err and {} or consumers) do
      local id = consumer[2] -- 'name' is first
      live[id] = redis.call('EXISTS', w_prefix .. id) == 1 or nil
    end
  end
  return live
end

local fields = {unpack(ARGV, 4)}
local difference = first_difference(fields)
if difference then
  local waiting, live = 0, live_workers()
  for i = 3, #KEYS do
    waiting = waiting + redis.call('XLEN', KEYS[i])
  end
  if waiting > 0 or next(live) then
    difference[4] = waiting
    for id in pairs(live) do
      difference[#difference + 1] = id
    end
    return difference
  end
end
if worker == '' then
  return {'OK'}
end
if difference then
  redis.call('DEL', KEYS[2])
end
if #fields > 0 then
  redis.call('HSET', KEYS[2], unpack(fields))
end
redis.call('SET', KEYS[1], 0, 'NX')
for i = 3, #KEYS do
  redis.pcall('XGROUP', 'CREATE', KEYS[i], group, '0', 'MKSTREAM') -- fails if the group exists
  redis.call('XGROUP', 'CREATECONSUMER', KEYS[i], group, worker)
end
return {'OK'}
