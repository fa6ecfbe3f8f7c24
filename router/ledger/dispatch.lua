-- queued -> running. Answers ok, stale_term or not_queued.
-- ARGV: id, worker, epoch, term, unfinished_ms

local id, worker, epoch, term, unfinished_ms = unpack(ARGV)

local state, its_epoch = unpack(redis.call('HMGET', request_key(id), 'state', 'epoch'))
if state == 'running' and its_epoch == epoch then
    -- Done before, whoever leads by now: the leader that did it has to tell the gateway.
    return {'ok', entry(id)}
elseif redis.call('HGET', ROOT .. 'term', 'term') ~= term then
    return {'stale_term'}
elseif state ~= 'queued' then
    return {'not_queued', state and entry(id)}
end
redis.call('HSET', request_key(id), 'state', 'running', 'worker', worker, 'epoch', epoch)
redis.call('HINCRBY', request_key(id), 'attempts', 1)
keep_for(id, unfinished_ms)
return {'ok', entry(id)}
