-- Stores the decisions of a model's autoscaler.
-- ARGV: model, Scaling

local model, scaling = unpack(ARGV)
redis.call('HSET', ROOT .. 'scaling', 'scaling ' .. model, scaling, 'moment ' .. model, digits(now()))
return {'ok'}
