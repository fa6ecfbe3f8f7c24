-- Adds a worker to the worker table, replacing any other worker at its address. An empty WorkerInfo
-- removes the worker from the table.
-- ARGV: worker id, WorkerInfo or '', address, model

local worker, info, address, model = unpack(ARGV)

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
    redis.call('HSET', ROOT .. 'last_workers', model, info)
end

if (redis.call('HGET', ROOT .. 'workers', worker) or '') ~= info then
    if info == '' then drop(worker) else put() end
    -- The version is a time and not a counter, so that a version that the server lost with its last
    -- second of writes is never used again.
    local version = tonumber(redis.call('GET', ROOT .. 'workers_version') or 0)
    redis.call('SET', ROOT .. 'workers_version', digits(math.max(now(), version + 1)))
end
return {'ok'}
