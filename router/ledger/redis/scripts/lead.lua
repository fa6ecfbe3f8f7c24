-- Takes or renews the leader's lease. Answers since when this term leads in µs, or nothing if another
-- one does, or led since. The shards are told by fence.lua.
-- ARGV: router, address, term, lease in µs, 1 if the lease is asked for, 0 if it is renewed

local router, address, term, lease, is_new = unpack(ARGV)

local held = redis.call('HMGET', ROOT .. 'leader', 'term', 'since', 'ends')
local its_term, since, ends = held[1], tonumber(held[2] or 0), tonumber(held[3] or 0)
local moment = now()
if its_term ~= term then
    if ends > moment then return false end
    -- Who slept through a term must begin anew. Where no term is known the server forgot this one.
    if its_term and is_new == '0' then return false end
    -- Grows from leader to leader, even if the clock does not.
    since = math.max(moment, since + 1)
end
write_though_full()
redis.call('HSET', ROOT .. 'leader', 'router', router, 'address', address, 'term', term,
    'since', digits(since), 'ends', digits(moment + lease))
return digits(since)
