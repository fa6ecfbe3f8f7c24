-- Stores an object if it has the expected version. Returns stored and its new version, or conflict
-- and its present version, which is 0 if it does not exist.
-- ARGV: name, data, expected version, call, time in ms during which the call may be retried,
--       retention_ms

local name, data, expected, call, call_ms, retention_ms = unpack(ARGV)

local done = redis.call('GET', call_key(call))
-- The call is repeated because its answer was lost. The object may have changed since.
if done then return {'stored', done} end
local known = redis.call('HGET', object_key(name), 'version') or '0'
if known ~= expected then return {'conflict', known} end
local moment = now()
-- The version is a time and not a counter, so that no version is used again after the object was
-- deleted, or after the server lost its last second of writes.
local version = digits(math.max(moment, known + 1))
redis.call('HSET', object_key(name), 'version', version, 'data', data)
redis.call('PEXPIRE', object_key(name), retention_ms)
redis.call('ZADD', collection_key(name), 0, name)
redis.call('ZADD', ROOT .. 'object_expiries', digits(moment + retention_ms * 1000), name)
redis.call('SET', call_key(call), version, 'PX', call_ms)
-- Sweep two objects, so that the sweep keeps up if as many objects expire as are created.
sweep_objects(2)
return {'stored', version}
