-- running -> queued, or -> failed at max_losses. Answers ok, or unknown.
-- ARGV: id, epoch, 1 if its worker was lost else 0, max_losses, slug and message of the failure,
--       retention_ms, unfinished_ms

local id, epoch, lost, max_losses, slug, message, retention_ms, unfinished_ms = unpack(ARGV)

local known = redis.call('HMGET', request_key(id), 'state', 'epoch', 'gateway', 'losses')
local state, its_epoch, gateway, losses = unpack(known)
if not state then
    return {'unknown'}
elseif state == 'running' and its_epoch == epoch then
    losses = losses + lost
    if lost == '1' and losses >= tonumber(max_losses) then
        finish(id, gateway, 'failed', retention_ms,
            'losses', losses, 'error_slug', slug, 'error_message', message)
    else
        queue(id, unfinished_ms, 'losses', losses)
    end
end
return {'ok', entry(id)}
