-- Stores what the leader of a term knows of the cluster's work; of another term nothing.
-- ARGV: term, ClusterLoad

local term, load = unpack(ARGV)

if redis.call('HGET', ROOT .. 'leader', 'term') == term then
    write_though_full()
    redis.call('HSET', ROOT .. 'load', 'load', load, 'moment', digits(now()))
end
return {'ok'}
