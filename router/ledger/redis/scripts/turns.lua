-- Returns the finished requests that have a turn, of the newest requests of a session: for each its
-- arrival in µs, its id, and its turn.
-- ARGV: session, the number of its newest requests that are examined

local session, count = ARGV[1], tonumber(ARGV[2])

local answer = {}
for _, id in ipairs(redis.call('ZRANGE', ROOT .. 'session:' .. session, 0, count - 1, 'REV')) do
    local state, turn, arrived = unpack(redis.call(
        'HMGET', request_key(id), 'state', 'turn', 'arrived'))
    if state == 'finished' and turn ~= '' then answer[#answer + 1] = {arrived, id, turn} end
end
return answer
