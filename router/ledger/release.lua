-- running -> queued, or -> failed at max_losses. Answers ok, or unknown.
-- ARGV: id, epoch, 1 if its worker was lost else 0, max_losses, slug and message of the failure,
--       retention_ms, unfinished_ms

local id, epoch, lost, max_losses, slug, message, retention_ms, unfinished_ms = unpack(ARGV)

local known = redis.call('HMGET', request_key(id), 'state', 'epoch', 'gateway')
local state, its_epoch, gateway = unpack(known)
if not state then
    return {'unknown'}
elseif state == 'running' and its_epoch == epoch then
    local losses = redis.call('HINCRBY', request_key(id), 'losses', lost)
    if lost == '1' and losses >= tonumber(max_losses) then
        finish(id, gateway, 'failed', retention_ms, 'error_slug', slug, 'error_message', message)
    else
        queue(id, unfinished_ms)
    end
end
return {'ok', entry(id)}
