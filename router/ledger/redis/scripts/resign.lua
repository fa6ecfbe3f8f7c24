-- Ends the leader's lease if it is held under `term`.
-- ARGV: term

if redis.call('HGET', ROOT .. 'leader', 'term') == ARGV[1] then
    write_though_full()
    redis.call('HSET', ROOT .. 'leader', 'ends', '0')
end
return {'ok'}
