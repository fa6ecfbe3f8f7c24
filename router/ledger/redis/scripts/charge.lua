-- Charges the largest amounts that a request may need to all limits of its tenant, or to none.
-- Returns charged; known, if another call charged the request before; or refused, the limit with
-- the longest wait, and that wait in µs (0: unknown).
-- ARGV: tenant, id, call, lease in µs, prompt tokens, tokens of prompt and outputs, and the limits,
--       each empty if there is none: requests per minute, tokens per minute, concurrent requests

local tenant, id, call, lease, prompt, tokens, requests_a_minute, tokens_a_minute, at_a_time = unpack(ARGV)
local moment = now()
-- Maximum number of charges that one call drops because their leases ended without a settlement.
local MANY = 64

local function drop_ended()
    for _, ended in ipairs(redis.call(
        'ZRANGEBYSCORE', slots_key(tenant), '-inf', digits(moment), 'LIMIT', 0, MANY))
    do
        redis.call('ZREM', slots_key(tenant), ended)
        redis.call('HDEL', charges_key(tenant), ended)
    end
end

local function is_full()
    return at_a_time ~= ''
        and redis.call('ZCOUNT', slots_key(tenant), '(' .. digits(moment), '+inf') >= tonumber(at_a_time)
end

-- Return the time at which a bucket is full again after `amount` is taken, and the wait in µs
-- before `amount` can be taken. The wait ends when the bucket has `amount`, or is full if it cannot
-- hold that much. It is 0 or negative if the bucket has enough. Without a limit, return nil and 0.
local function taken(limit, amount, a_minute)
    if a_minute == '' then return nil, 0 end
    local due = math.max(tonumber(redis.call('HGET', buckets_key(tenant), limit) or 0), moment)
    local least = math.min(tonumber(amount), tonumber(a_minute))
    return due + cost(amount, a_minute), due + cost(least, a_minute) - moment - MINUTE
end

local function hold()
    redis.call('ZADD', slots_key(tenant), digits(moment + lease), id)
    keep_slots(tenant, lease)
end

local function take(due_of_requests, due_of_tokens)
    redis.call('HSET', charges_key(tenant), id,
        table.concat({call, prompt, tokens, requests_a_minute, tokens_a_minute}, ' '))
    hold()
    local last = moment
    for limit, due in pairs({requests = due_of_requests, tokens = due_of_tokens}) do
        redis.call('HSET', buckets_key(tenant), limit, digits(due))
        last = math.max(last, due)
    end
    -- The key may expire when all buckets are full, because a missing bucket counts as full.
    local left = redis.call('PTTL', buckets_key(tenant))
    redis.call('PEXPIRE', buckets_key(tenant),
        digits(math.max(left, math.ceil((last - moment) / 1000) + 1000)))
end

drop_ended()
local known = redis.call('HGET', charges_key(tenant), id)
if known then
    hold()
    return {known:match('^%S+') == call and 'charged' or 'known'}
elseif is_full() then
    return {'refused', 'max_concurrent', '0'}
end
local due_of_requests, wait_for_requests = taken('requests', 1, requests_a_minute)
local due_of_tokens, wait_for_tokens = taken('tokens', tokens, tokens_a_minute)
local wait = math.max(wait_for_requests, wait_for_tokens)
if wait > 0 then
    local limit = wait == wait_for_requests and 'requests_per_minute' or 'tokens_per_minute'
    return {'refused', limit, digits(wait)}
end
take(due_of_requests, due_of_tokens)
return {'charged'}
