-- LIMIT: spend requests and tokens of an API key, whose limits per minute all gateways share. Both are buckets that refill
-- evenly; tokens may go into debt. A refused request spends nothing, but the tokens of earlier ones are counted.
-- KEYS  what the key has left
-- ARGV  1 fleet clock in milliseconds
--       2 requests per minute, 0 for no limit
--       3 tokens per minute, 0 for no limit
--       4 requests to spend
--       5 tokens spent since the last call; a negative number returns them
--       6 1 to refuse a key in debt
-- reply {OK | REQUESTS | TOKENS, milliseconds until the call succeeds, tokens left as text}
local now, requests_limit, tokens_limit = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local requests, tokens, refuses_debt = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1'
local stored = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local at = tonumber(stored[3]) or now
now = math.max(now, at)

local function refilled(level, limit)
  return math.min(limit, (tonumber(level) or limit) + (now - at) * limit / 60000)
end

local requests_left, tokens_left = refilled(stored[1], requests_limit), refilled(stored[2], tokens_limit) - tokens
local verdict, wait = 'OK', 0
if requests_limit > 0 and requests_left < requests then
  verdict, wait = 'REQUESTS', (requests - requests_left) * 60000 / requests_limit
elseif refuses_debt and tokens_limit > 0 and tokens_left < 1 then
  verdict, wait = 'TOKENS', (1 - tokens_left) * 60000 / tokens_limit
else
  requests_left = requests_left - requests
end
redis.call('HSET', KEYS[1], 'requests', requests_left, 'tokens', tokens_left, 'at', now)
-- Then both buckets are full again, and nothing need be known.
local debt = tokens_limit > 0 and math.max(0, -tokens_left) / tokens_limit or 0
redis.call('EXPIRE', KEYS[1], 120 + math.ceil(60 * debt))
return {verdict, math.ceil(wait), tostring(tokens_left)}
