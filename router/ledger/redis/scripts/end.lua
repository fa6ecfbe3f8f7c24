-- queued or running -> failed, cancelled or expired, unless an `owner` is given that does not own
-- the request. Returns ok and the entry, or unknown.
-- ARGV: id, state, slug, message, retention_ms, explanation, and optionally owner

local id, final, slug, message, retention_ms, explanation, owner = unpack(ARGV)

local known = redis.call('HMGET', request_key(id), 'state', 'gateway', 'moves')
local state, gateway, moves = unpack(known)
if not state then
    return {'unknown'}
elseif not is_final(state) and (not owner or owner == gateway) then
    finish(id, gateway, final, retention_ms,
        'error_slug', slug, 'error_message', message, 'moves', moves + 1)
    note(id, 'end', slug)
    explain(id, explanation)
end
return {'ok', entry(id)}
