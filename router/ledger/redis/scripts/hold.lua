-- Extends the time for which unfinished requests count as concurrent, to one lease from now.
-- ARGV: lease in µs, and for each request its tenant and id

local lease = ARGV[1]
local ends = digits(now() + lease)

write_though_full()
for i = 2, #ARGV, 2 do
    redis.call('ZADD', slots_key(ARGV[i]), ends, ARGV[i + 1])
    keep_slots(ARGV[i], lease)
end
return {'ok'}
