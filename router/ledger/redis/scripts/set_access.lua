-- Changes records of who may come in.
-- ARGV: for each its name and text; without text it goes

for i = 1, #ARGV, 2 do
    if ARGV[i + 1] == '' then
        redis.call('HDEL', ROOT .. 'access', ARGV[i])
    else
        redis.call('HSET', ROOT .. 'access', ARGV[i], ARGV[i + 1])
    end
end
-- A moment, not a counter: one that was lost with the server's last second never comes again.
local version = tonumber(redis.call('GET', ROOT .. 'access_version') or 0)
redis.call('SET', ROOT .. 'access_version', digits(math.max(now(), version + 1)))
return {'ok'}
