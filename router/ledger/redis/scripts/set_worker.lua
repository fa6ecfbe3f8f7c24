-- Puts a worker into the table, in place of any other at its address, or with an empty info out of it.
-- ARGV: worker id, WorkerInfo, address

local worker, info, address = unpack(ARGV)

local function drop(id)
    redis.call('HDEL', ROOT .. 'workers', id)
    redis.call('HDEL', ROOT .. 'worker_addresses', id)
end

local function put()
    local addresses = redis.call('HGETALL', ROOT .. 'worker_addresses')
    for i = 1, #addresses, 2 do
        if addresses[i + 1] == address then drop(addresses[i]) end
    end
    redis.call('HSET', ROOT .. 'workers', worker, info)
    redis.call('HSET', ROOT .. 'worker_addresses', worker, address)
    redis.call('SET', ROOT .. 'last_worker', info)
end

if (redis.call('HGET', ROOT .. 'workers', worker) or '') ~= info then
    if info == '' then drop(worker) else put() end
    -- A moment, not a counter: one that was lost with the server's last second never comes again.
    local version = tonumber(redis.call('GET', ROOT .. 'workers_version') or 0)
    redis.call('SET', ROOT .. 'workers_version', digits(math.max(now(), version + 1)))
end
return {'ok'}
