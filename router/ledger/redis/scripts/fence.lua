-- Makes this shard accept dispatches under `term` only. Returns 1, or 0 if the shard has the term
-- of a newer leader.
-- ARGV: term, start of the term in µs

local term, since = ARGV[1], ARGV[2]

if tonumber(redis.call('HGET', ROOT .. 'term', 'since') or 0) > tonumber(since) then
    return 0
end
write_though_full()
redis.call('HSET', ROOT .. 'term', 'term', term, 'since', since)
return 1
