-- REAP: end a worker incarnation and requeue its requests. It deletes the fence first, so that the worker's CLAIM, EMIT, and
-- FINISH are refused even if it still runs. Entries that are no longer pending for it are skipped, so a repeated call does
-- nothing. `strikes` counts crashes without a new journal token, by a worker that had started the request (`worker` names it).
-- After `max crashes` the request runs alone; a crash while alone, or too many attempts, makes it a dead letter.
-- KEYS  w, dlq, resumed queue, q, held, held of the last class, queue of requests with needs, order, (r, j)...
-- ARGV  worker id, group, crash|drain, max crashes, max attempts, seconds to keep r and j of a dead letter, prefix of
--       the gateway channels, prefix of the control channels, then (entry id, request id, error event, blob of it) for each (r, j)
-- reply {requeued, dead letters, dropped (cancelled), 1 if entries are still pending for the worker, or 0}
local fence, dlq, resumed, q = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, group, mode, max_crashes, max_attempts, keep_seconds, prefix = unpack(ARGV, 1, 7)
local channel_prefix = ARGV[8]
local requeued, dead, dropped = 0, 0, 0

redis.call('DEL', fence)
redis.call('ZREM', KEYS[5], worker)
redis.call('ZREM', KEYS[6], worker)
redis.pcall('UNLINK', home_key(KEYS[8], worker))

for i = 1, (#KEYS - 8) / 2 do
  local r, j = KEYS[7 + 2 * i], KEYS[8 + 2 * i]
  local entry, id, event, blob = unpack(ARGV, 5 + 4 * i, 8 + 4 * i)
  if is_pending(q, group, entry, worker) then
    redis.call('XACK', q, group, entry)
    redis.call('XDEL', q, entry)
    local request = redis.pcall('HMGET', r, 'state', 'worker', 'attempt', 'strikes', 'jl', 'solo', 'gateway', 'body', 'entry',
      'needs', 'context')
    local length = redis.pcall('STRLEN', j)
    -- If the request names another entry, it was accepted again and does not belong to this worker.
    if request.err or not request[8] or request[1] == 'done' or request[9] ~= entry or type(length) ~= 'number' then
      dropped = dropped + 1
      if not request.err and not request[8] then
        redis.call('UNLINK', j)
      end
    else
      local attempt, crashes = tonumber(request[3]) or 1, tonumber(request[4]) or 0
      local jl, solo = tonumber(request[5]) or 0, request[6]
      local is_dead = false
      if mode == 'crash' and request[2] == worker then
        attempt = attempt + 1
        if length == jl then
          crashes = crashes + 1
          is_dead = solo == '1'
        end
        is_dead = is_dead or attempt > tonumber(max_attempts)
      end
      if is_dead then
        dead = dead + 1
        redis.call('XADD', dlq, 'MAXLEN', '~', 1000, '*', 'r', id, 'worker', worker, 'attempts', attempt - 1,
          'strikes', crashes, 'journal_bytes', length)
        redis.call('HSET', r, 'state', 'done', 'terminal', event, 'strikes', crashes)
        redis.call('EXPIRE', r, keep_seconds)
        redis.call('EXPIRE', j, keep_seconds)
        redis.call('PUBLISH', prefix .. (request[7] or ''), blob)
      else
        requeued = requeued + 1
        if crashes >= tonumber(max_crashes) then
          solo = '1'
        end
        local again = requeue(entry, resumed, KEYS[7], id, solo, request[10], request[11])
        redis.call('HDEL', r, 'worker', 'claim')
        redis.call('HSET', r, 'state', 'queued', 'attempt', attempt, 'strikes', crashes, 'jl', length, 'solo', solo,
          'entry', again)
      end
    end
  end
end

if requeued > 0 then
  wake(KEYS[5], channel_prefix, requeued, {})
end
local has_more = #redis.call('XPENDING', q, group, '-', '+', 1, worker)
if has_more == 0 then
  redis.call('XGROUP', 'DELCONSUMER', q, group, worker)
end
return {requeued, dead, dropped, has_more}
