-- What the autoscaler decided last, and how long ago in µs it said so; nothing if it never did.

local scaling, moment = unpack(redis.call('HMGET', ROOT .. 'scaling', 'scaling', 'moment'))
if not scaling then return {} end
return {scaling, digits(math.max(0, now() - moment))}
