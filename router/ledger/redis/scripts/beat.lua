-- Renews a gateway's lease. Returns the current time, the leader's router, address and term, and
-- the versions of the worker table and of the policy. Without a leader, router and address are
-- empty and the term is 0.
-- ARGV: gateway, address, lease in µs

local gateway, address, lease = unpack(ARGV)
-- Leases that ended longer ago than this (µs) are deleted. They are not needed, because a gateway
-- without a lease counts as dead, too.
local FORGOTTEN_AFTER = 86400 * 1000000

write_though_full()
local moment = now()
for _, dead in ipairs(redis.call(
    'ZRANGEBYSCORE', ROOT .. 'leases', '-inf', digits(moment - FORGOTTEN_AFTER)))
do
    redis.call('ZREM', ROOT .. 'leases', dead)
    redis.call('HDEL', ROOT .. 'addresses', dead)
end
redis.call('ZADD', ROOT .. 'leases', digits(moment + lease), gateway)
redis.call('HSET', ROOT .. 'addresses', gateway, address)

local router, its_address, term, ends = unpack(
    redis.call('HMGET', ROOT .. 'leader', 'router', 'address', 'term', 'ends'))
if not ends or tonumber(ends) <= moment then
    router, its_address, term = '', '', '0'
end
local workers_version = redis.call('GET', ROOT .. 'workers_version') or '0'
local policy_version = redis.call('HGET', ROOT .. 'policy', 'version') or '0'
return {digits(moment), router, its_address, term, workers_version, policy_version}
