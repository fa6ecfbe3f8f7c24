-- Who may come in, with its version; nothing if that is the one that is known.
-- ARGV: the known version

local version = redis.call('GET', ROOT .. 'access_version') or '0'
if version == ARGV[1] then return {} end
return {version, redis.call('HGETALL', ROOT .. 'access')}
