-- Changes records of API keys and tenants.
-- ARGV: for each record its name and text; an empty text removes the record

for i = 1, #ARGV, 2 do
    if ARGV[i + 1] == '' then
        redis.call('HDEL', ROOT .. 'access', ARGV[i])
    else
        redis.call('HSET', ROOT .. 'access', ARGV[i], ARGV[i + 1])
    end
end
-- The version is a time and not a counter, so that a version that the server lost with its last
-- second of writes is never used again.
local version = tonumber(redis.call('GET', ROOT .. 'access_version') or 0)
redis.call('SET', ROOT .. 'access_version', digits(math.max(now(), version + 1)))
return {'ok'}
