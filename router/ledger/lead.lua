-- Takes or renews the leader's lease. Answers since when this term leads in µs, or nothing if another
-- one does. The shards are told by fence.lua.
-- ARGV: router, address, term, lease in µs

local router, address, term, lease = unpack(ARGV)

local held = redis.call('HMGET', ROOT .. 'leader', 'term', 'since', 'ends')
local its_term, since, ends = held[1], tonumber(held[2] or 0), tonumber(held[3] or 0)
local moment = now()
if its_term ~= term then
    if ends > moment then return false end
    -- Grows from leader to leader, even if the clock does not.
    since = math.max(moment, since + 1)
end
redis.call('HSET', ROOT .. 'leader', 'router', router, 'address', address, 'term', term,
    'since', digits(since), 'ends', digits(moment + lease))
return digits(since)
