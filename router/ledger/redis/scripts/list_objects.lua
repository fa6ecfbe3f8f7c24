-- Lists the names of objects of a tenant and kind, in descending order, and removes expired objects
-- from the listing.
-- ARGV: part of the names before the last slash, the name before which the listing begins or '', and
--       the maximum number of names

local collection, from, limit = ARGV[1], ARGV[2] == '' and '+' or '(' .. ARGV[2], tonumber(ARGV[3])
local key = ROOT .. 'objects:' .. collection

local answer = {}
while #answer < limit do
    local names = redis.call('ZRANGE', key, from, '-', 'BYLEX', 'REV', 'LIMIT', 0, limit - #answer)
    if #names == 0 then break end
    for _, name in ipairs(names) do
        if redis.call('EXISTS', object_key(name)) == 1 then
            answer[#answer + 1] = name
        else
            -- Each name is removed once, so this adds a constant to the cost of its object.
            unlist_object(name)
        end
    end
    from = '(' .. names[#names]
end
return answer
