-- Common code of ATTACH, REAP, and UNCLAIM: queue a request again. A request with needs waits in `newer`, which workers without
-- support for needs do not read.
local function requeue(resumed, newer, id, solo, needs, context)
  local fields = {'r', id, 's', solo}
  if needs then
    fields[#fields + 1], fields[#fields + 2] = 'n', needs
  end
  if context then
    fields[#fields + 1], fields[#fields + 2] = 'l', context
  end
  return redis.call('XADD', needs and newer or resumed, '*', unpack(fields))
end

