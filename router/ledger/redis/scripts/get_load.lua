-- What the last leader knew of the cluster's work, and how long ago in µs; nothing if none said so.

local load, moment = unpack(redis.call('HMGET', ROOT .. 'load', 'load', 'moment'))
if not load then return {} end
return {load, digits(math.max(0, now() - moment))}
