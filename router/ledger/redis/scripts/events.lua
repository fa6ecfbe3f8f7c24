-- Returns ok and the events of a request, oldest first; or unknown.
-- ARGV: id

local id = ARGV[1]

if redis.call('EXISTS', request_key(id)) == 0 then
    return {'unknown'}
end
return {'ok', redis.call('LRANGE', events_key(id), 0, -1)}
