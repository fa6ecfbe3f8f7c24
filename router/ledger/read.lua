-- Answers what is stored, unknown, or beyond: no such offset.
-- ARGV: id, offset

local id, offset = ARGV[1], tonumber(ARGV[2])

if redis.call('EXISTS', request_key(id)) == 0 then
    return {'unknown'}
elseif offset < 0 or offset * 4 > redis.call('STRLEN', tokens_key(id)) then
    return {'beyond'}
end
return continuation(id, offset)
