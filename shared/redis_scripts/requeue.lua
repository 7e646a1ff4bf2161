-- Common code of ATTACH, REAP, and UNCLAIM: queue a request again, after its `earlier` entry. A request with needs waits in
-- `newer`, which workers without support for needs do not read.
local function requeue(earlier, resumed, newer, id, solo, needs, context)
  local fields = {'r', id, 's', solo}
  if needs then
    fields[#fields + 1], fields[#fields + 2] = 'n', needs
  end
  if context then
    fields[#fields + 1], fields[#fields + 2] = 'l', context
  end
  return add_after(earlier, needs and newer or resumed, fields)
end

