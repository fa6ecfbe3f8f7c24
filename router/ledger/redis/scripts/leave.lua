-- Ends a gateway's lease.
-- ARGV: gateway

write_though_full()
redis.call('ZADD', ROOT .. 'leases', 'XX', 'LT', digits(now()), ARGV[1])
return {'ok'}
