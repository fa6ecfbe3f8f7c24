-- Stores what the autoscaler decided.
-- ARGV: Scaling

redis.call('HSET', ROOT .. 'scaling', 'scaling', ARGV[1], 'moment', digits(now()))
return {'ok'}
