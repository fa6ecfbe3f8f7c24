-- queued -> gone.
-- ARGV: id

local id = ARGV[1]

local state, gateway = unpack(redis.call('HMGET', request_key(id), 'state', 'gateway'))
if state == 'queued' then
    disown(id, gateway)
    redis.call('DEL', unpack(all_keys(id)))
end
return {'ok'}
