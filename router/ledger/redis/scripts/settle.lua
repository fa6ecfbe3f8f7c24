-- Settles the charges of requests that have ended: frees their slots, and refunds to their tenants
-- what they did not use. Nothing is refunded for a request that was not charged or is already
-- settled.
-- ARGV: for each request its tenant, its id, and its output tokens, empty if it never began

local function give_back(tenant, limit, time)
    local due = redis.call('HGET', buckets_key(tenant), limit)
    if due then redis.call('HSET', buckets_key(tenant), limit, digits(due - time)) end
end

local function settle(tenant, charge, output)
    local prompt, tokens, requests_a_minute, tokens_a_minute = charge:match(
        '^%S+ (%d+) (%d+) (%d*) (%d*)$')
    local used = output == '' and 0 or prompt + output
    if output == '' and requests_a_minute ~= '' then
        give_back(tenant, 'requests', cost(1, requests_a_minute))
    end
    if tokens_a_minute ~= '' then
        give_back(tenant, 'tokens', cost(tokens, tokens_a_minute) - cost(used, tokens_a_minute))
    end
end

for i = 1, #ARGV, 3 do
    local tenant, id, output = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    redis.call('ZREM', slots_key(tenant), id)
    local charge = redis.call('HGET', charges_key(tenant), id)
    if charge then
        redis.call('HDEL', charges_key(tenant), id)
        settle(tenant, charge, output)
    end
end
return {'ok'}
