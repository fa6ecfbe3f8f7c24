-- queued or running -> failed, cancelled or expired. Answers ok, or unknown.
-- ARGV: id, state, slug, message, retention_ms

local id, final, slug, message, retention_ms = unpack(ARGV)

local state, gateway = unpack(redis.call('HMGET', request_key(id), 'state', 'gateway'))
if not state then
    return {'unknown'}
elseif not is_final(state) then
    finish(id, gateway, final, retention_ms, 'error_slug', slug, 'error_message', message)
end
return {'ok', entry(id)}
