-- queued -> running. Returns ok and the entry; stale_term; or not_queued and the entry, if there is
-- one.
-- ARGV: id, worker, epoch, term, unfinished_ms

local id, worker, epoch, term, unfinished_ms = unpack(ARGV)

local known = redis.call('HMGET', request_key(id), 'state', 'epoch', 'attempts', 'moves')
local state, its_epoch, attempts, moves = unpack(known)
if state == 'running' and its_epoch == epoch then
    -- The dispatch was made by an earlier call. It stays valid whichever router leads now, because
    -- the leader that made it must notify the gateway.
    return {'ok', entry(id)}
elseif not leads(term) then
    return {'stale_term'}
elseif state ~= 'queued' then
    return {'not_queued', state and entry(id)}
end
run(id, worker, epoch, attempts + 1, moves + 1)
keep_for(id, unfinished_ms)
return {'ok', entry(id)}
