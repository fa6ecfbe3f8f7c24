-- Stores the load of the cluster that the leader reports; ignored unless `term` is the leader's.
-- ARGV: term, ClusterLoad

local term, load = unpack(ARGV)

if redis.call('HGET', ROOT .. 'leader', 'term') == term then
    write_though_full()
    redis.call('HSET', ROOT .. 'load', 'load', load, 'moment', digits(now()))
end
return {'ok'}
