-- From now on this shard takes dispatches of `term` alone. Answers 0 if a newer leader was here.
-- ARGV: term, since when it leads in µs

local term, since = ARGV[1], ARGV[2]

if tonumber(redis.call('HGET', ROOT .. 'term', 'since') or 0) > tonumber(since) then
    return 0
end
write_though_full()
redis.call('HSET', ROOT .. 'term', 'term', term, 'since', since)
return 1
