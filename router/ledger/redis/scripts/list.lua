-- Lists requests by arrival, newest first, and removes expired requests from the listings. Returns 1
-- if there are no older requests, else 0; then for each request its id, its arrival in µs, and its
-- entry, which is empty if the request is in another state or no longer exists.
-- ARGV: name of the listing's key, the arrival in µs to start from or '+inf', the maximum number of
--       requests in addition to those with exactly this arrival, and the requested states; none: all
--       states

local name, from, count = ARGV[1], ARGV[2], tonumber(ARGV[3])

local wanted = {}
for i = 4, #ARGV do wanted[ARGV[i]] = true end

local key = ROOT .. name

local function look(id)
    local state = redis.call('HGET', request_key(id), 'state')
    if not state then
        unlist(id, 0)
    elseif #ARGV == 3 or wanted[state] then
        return entry(id)
    end
    return {}
end

local most = count + #redis.call('ZRANGEBYSCORE', key, from, from)
local found = redis.call('ZRANGE', key, from, '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, most, 'WITHSCORES')
local answer = {#found < 2 * most and 1 or 0}
for i = 1, #found, 2 do
    answer[#answer + 1] = {found[i], found[i + 1], look(found[i])}
end
return answer
