-- Returns ok and the entry of a request; unknown; or erased.
-- ARGV: id

local id = ARGV[1]

if redis.call('EXISTS', request_key(id)) == 0 then
    return unknown(id)
end
return {'ok', entry(id)}
