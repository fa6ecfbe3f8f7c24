-- Deletes an object. Returns 1 if it existed, else 0.
-- ARGV: name, call, time in ms during which the call may be retried

local name, call, call_ms = unpack(ARGV)

-- The call is repeated because its answer was lost. An object that has the name now is another one.
if redis.call('EXISTS', call_key(call)) == 1 then return 1 end
if redis.call('DEL', object_key(name)) == 0 then return 0 end
unlist_object(name)
redis.call('SET', call_key(call), '', 'PX', call_ms)
return 1
