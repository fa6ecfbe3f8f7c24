-- Returns the decisions that the autoscaler reported last, and the age of the report in µs; empty
-- if there is none.

local scaling, moment = unpack(redis.call('HMGET', ROOT .. 'scaling', 'scaling', 'moment'))
if not scaling then return {} end
return {scaling, digits(math.max(0, now() - moment))}
