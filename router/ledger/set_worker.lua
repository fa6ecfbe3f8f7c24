-- Puts a worker into the table, or with an empty info out of it.
-- ARGV: worker id, WorkerInfo

local worker, info = ARGV[1], ARGV[2]

if (redis.call('HGET', ROOT .. 'workers', worker) or '') ~= info then
    if info == '' then
        redis.call('HDEL', ROOT .. 'workers', worker)
    else
        redis.call('HSET', ROOT .. 'workers', worker, info)
    end
    -- A moment, not a counter: one that was lost with the server's last second never comes again.
    local version = tonumber(redis.call('GET', ROOT .. 'workers_version') or 0)
    redis.call('SET', ROOT .. 'workers_version', digits(math.max(now(), version + 1)))
end
return {'ok'}
