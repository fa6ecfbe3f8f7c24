-- queued or running -> queued, owned by `gateway`, if `owner` owned the request. Returns what is
-- stored of the request (see continuation), or unknown.
-- ARGV: id, gateway, owner, call, unfinished_ms

local id, gateway, owner, call, unfinished_ms = unpack(ARGV)

local known = redis.call('HMGET', request_key(id), 'state', 'gateway', 'call', 'moves')
local state, its_gateway, its_call, moves = unpack(known)
if not state then
    return {'unknown'}
elseif not is_final(state) and its_gateway == owner and its_call ~= call then
    disown(id, its_gateway)
    own(id, gateway)
    queue(id, unfinished_ms, 'gateway', gateway, 'call', call, 'moves', moves + 1)
    note(id, 'take_over', gateway)
end
return continuation(id, {})
