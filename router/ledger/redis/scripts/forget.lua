-- final -> gone, with prompt, outputs and events. Returns gone; ok and the entry if the request is
-- not final; or unknown.
-- ARGV: id, call, time in ms during which the call may be retried, retention_ms

local id, call, call_ms, retention_ms = unpack(ARGV)

local state, arrived = unpack(redis.call('HMGET', request_key(id), 'state', 'arrived'))
if redis.call('EXISTS', call_key(call)) == 1 then
    -- The call is repeated because its answer was lost. A request that has the id now is another
    -- one.
    return {'gone'}
elseif not state then
    return {'unknown'}
elseif not is_final(state) then
    return {'ok', entry(id)}
end
redis.call('DEL', unpack(all_keys(id)))
unlist(id, math.huge)
redis.call('SET', call_key(call), '', 'PX', call_ms)
for _, key in ipairs({grave_key(id, arrived), forgotten_key(id)}) do
    redis.call('SET', key, '', 'PX', retention_ms)
end
return {'gone'}
