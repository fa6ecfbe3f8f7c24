-- Stores the decisions of the autoscaler.
-- ARGV: Scaling

redis.call('HSET', ROOT .. 'scaling', 'scaling', ARGV[1], 'moment', digits(now()))
return {'ok'}
