-- queued -> gone, if `owner` owns the request. Returns gone, also if the request does not exist; or
-- ok and the entry if the request stays.
-- ARGV: id, owner

local id, owner = unpack(ARGV)

local state, gateway = unpack(redis.call('HMGET', request_key(id), 'state', 'gateway'))
if not state then
    return {'gone'}
elseif state ~= 'queued' or gateway ~= owner then
    return {'ok', entry(id)}
end
disown(id, gateway)
redis.call('DEL', unpack(all_keys(id)))
unlist(id, math.huge)
return {'gone'}
