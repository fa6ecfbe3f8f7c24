-- Finds unfinished requests of one shard whose gateway has no lease any more. Requests of the
-- gateway whose lease ended first come first. Returns pairs: the end of the gateway's lease in µs,
-- or 0 if there was none, and the request id. The script also removes expired requests and objects
-- from the listings, because the leader runs it regularly.
-- ARGV: limit, now in µs, and for each known gateway: its id, the end of its lease in µs

-- Number of listed requests, and of objects, that one call checks.
local SWEPT = 64

local limit, moment = tonumber(ARGV[1]), tonumber(ARGV[2])

local ends = {}
for i = 3, #ARGV, 2 do
    ends[ARGV[i]] = tonumber(ARGV[i + 1])
end

local dead = {}
for _, gateway in ipairs(redis.call('SMEMBERS', ROOT .. 'owners')) do
    if (ends[gateway] or 0) <= moment then
        dead[#dead + 1] = gateway
    end
end
table.sort(dead, function(a, b) return (ends[a] or 0) < (ends[b] or 0) end)

local found = {}
for _, gateway in ipairs(dead) do
    if #found >= limit then break end
    for _, id in ipairs(redis.call('SRANDMEMBER', ROOT .. 'owned:' .. gateway, limit - #found)) do
        if redis.call('EXISTS', request_key(id)) == 1 then
            found[#found + 1] = {digits(ends[gateway] or 0), id}
        else
            -- The request has expired, because no gateway took it over in time.
            disown(id, gateway)
        end
    end
end
sweep(SWEPT)
sweep_objects(SWEPT)
return found
