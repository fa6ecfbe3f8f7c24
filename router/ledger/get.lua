-- Answers ok, or unknown.
-- ARGV: id

local id = ARGV[1]

if redis.call('EXISTS', request_key(id)) == 0 then
    return {'unknown'}
end
return {'ok', entry(id)}
