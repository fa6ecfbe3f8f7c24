-- running -> queued, or -> failed if the number of losses reaches max_losses. Returns ok and the
-- entry, or unknown.
-- ARGV: id, epoch, 1 if the worker was lost else 0, cause of the loss or '', max_losses, slug and
--       message of the failure, tally, retention_ms, unfinished_ms, explanation

local id, epoch, lost, cause, max_losses, slug, message, tally, retention_ms, unfinished_ms, explanation =
    unpack(ARGV)

local known = redis.call('HMGET', request_key(id), 'state', 'epoch', 'gateway', 'losses', 'moves')
local state, its_epoch, gateway, losses, moves = unpack(known)
if not state then
    return {'unknown'}
elseif state == 'running' and its_epoch == epoch then
    losses, moves = losses + lost, moves + 1
    if lost == '1' and losses >= tonumber(max_losses) then
        finish(id, gateway, 'failed', retention_ms,
            'losses', losses, 'moves', moves, 'tally', tally,
            'error_slug', slug, 'error_message', message)
    else
        queue(id, unfinished_ms, 'losses', losses, 'moves', moves, 'tally', tally)
    end
    note(id, 'release', cause)
    explain(id, explanation)
end
return {'ok', entry(id)}
