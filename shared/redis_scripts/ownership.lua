-- Common code of CLAIM, EMIT, FINISH, UNCLAIM, and REAP: what belongs to a worker.

-- The `claim` of a request that this worker runs by this entry.
local function claim_of(worker, entry)
  return worker .. ' ' .. entry
end

-- Whether the entry was delivered to this worker and not acknowledged.
local function is_pending(q, group, entry, worker)
  return #redis.call('XPENDING', q, group, entry, entry, 1, worker) == 1
end
