-- Returns what is stored of a request (see continuation); unknown; erased; or beyond, if an offset
-- or its choice does not exist.
-- ARGV: id, and the offsets of the choices, from the first choice on

local id = ARGV[1]

local offsets = {}
for i = 2, #ARGV do offsets[i - 1] = tonumber(ARGV[i]) end

local function is_beyond(choice, offset)
    return offset < 0 or offset * 4 > redis.call('STRLEN', tokens_key(id, choice))
end

if redis.call('EXISTS', request_key(id)) == 0 then
    return unknown(id)
elseif #offsets > num_choices(id) then
    return {'beyond'}
end
for i, offset in ipairs(offsets) do
    if is_beyond(i - 1, offset) then return {'beyond'} end
end
return continuation(id, offsets)
