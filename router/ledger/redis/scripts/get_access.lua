-- Returns the version and the records of API keys and tenants; empty if the version is the known
-- one.
-- ARGV: the known version

local version = redis.call('GET', ROOT .. 'access_version') or '0'
if version == ARGV[1] then return {} end
return {version, redis.call('HGETALL', ROOT .. 'access')}
