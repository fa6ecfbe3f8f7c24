-- Takes or renews the leader's lease. Returns the start of the term in µs. Returns false if another
-- term holds the lease, or, for a renewal, if another term has held it since. The caller then
-- writes a granted term to all shards (fence.lua).
-- ARGV: router, address, term, lease in µs, 1 to request the lease, 0 to renew it

local router, address, term, lease, is_new = unpack(ARGV)

local held = redis.call('HMGET', ROOT .. 'leader', 'term', 'since', 'ends')
local its_term, since, ends = held[1], tonumber(held[2] or 0), tonumber(held[3] or 0)
local moment = now()
if its_term ~= term then
    if ends > moment then return false end
    -- A leader that missed another term must start again. If no term is stored, the server lost
    -- this one, and the renewal is granted.
    if its_term and is_new == '0' then return false end
    -- The start increases from term to term, even if the clock does not.
    since = math.max(moment, since + 1)
end
write_though_full()
redis.call('HSET', ROOT .. 'leader', 'router', router, 'address', address, 'term', term,
    'since', digits(since), 'ends', digits(moment + lease))
return digits(since)
