-- Returns the last load that a leader reported, and the age of the report in µs; empty if there is
-- none.

local load, moment = unpack(redis.call('HMGET', ROOT .. 'load', 'load', 'moment'))
if not load then return {} end
return {load, digits(math.max(0, now() - moment))}
