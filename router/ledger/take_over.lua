-- queued or running -> queued, owned by `gateway` if `owner` owned it. Answers what is stored, or
-- unknown.
-- ARGV: id, gateway, owner, call, unfinished_ms

local id, gateway, owner, call, unfinished_ms = unpack(ARGV)

local known = redis.call('HMGET', request_key(id), 'state', 'gateway', 'call')
local state, its_gateway, its_call = unpack(known)
if not state then
    return {'unknown'}
elseif not is_final(state) and its_gateway == owner and its_call ~= call then
    disown(id, its_gateway)
    own(id, gateway)
    queue(id, unfinished_ms, 'gateway', gateway, 'call', call)
end
return continuation(id, {})
