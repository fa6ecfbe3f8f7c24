-- Takes of a tenant's limits what a request may need, all of it or nothing. Answers charged; known: another
-- call took it before; or refused, the limit that has to be waited for longest, and for how long in µs.
-- ARGV: tenant, id, call, lease in µs, prompt tokens, tokens in all, requests a minute, tokens a minute,
--       requests at a time; a limit that there is not is empty

local tenant, id, call, lease, prompt, tokens, requests_a_minute, tokens_a_minute, at_a_time = unpack(ARGV)
local moment = now()
-- Of what was never settled so much is dropped at a time.
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

-- When a bucket is full again after `amount` is taken, and how long that has to wait; nothing and a wait
-- of 0 without a limit.
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
    -- A bucket that is full is as good as none.
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
