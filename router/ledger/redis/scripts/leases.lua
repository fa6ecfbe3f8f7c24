-- Returns the current time in µs, and for each known gateway its id, its address, and the end of
-- its lease in µs.

local answer = {digits(now())}
local leases = redis.call('ZRANGE', ROOT .. 'leases', 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
    answer[#answer + 1] = leases[i]
    answer[#answer + 1] = redis.call('HGET', ROOT .. 'addresses', leases[i])
    answer[#answer + 1] = digits(leases[i + 1])
end
return answer
