-- queued -> running. Answers ok, stale_term or not_queued.
-- ARGV: id, worker, epoch, term, unfinished_ms

local id, worker, epoch, term, unfinished_ms = unpack(ARGV)

local known = redis.call('HMGET', request_key(id), 'state', 'epoch', 'attempts', 'moves')
local state, its_epoch, attempts, moves = unpack(known)
if state == 'running' and its_epoch == epoch then
    -- Done before, whoever leads by now: the leader that did it has to tell the gateway.
    return {'ok', entry(id)}
elseif not leads(term) then
    return {'stale_term'}
elseif state ~= 'queued' then
    return {'not_queued', state and entry(id)}
end
run(id, worker, epoch, attempts + 1, moves + 1)
keep_for(id, unfinished_ms)
return {'ok', entry(id)}
