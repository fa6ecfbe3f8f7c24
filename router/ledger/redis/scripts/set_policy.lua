-- Changes settings of queue and engines by name. An empty value unsets a setting, and settings that
-- are not named stay unchanged. With a version, the call restores a policy that was set before,
-- with all its settings: it replaces the stored policy if that is older, and otherwise changes
-- nothing. Returns the resulting names and values, including the version.
-- ARGV: version or '', and names, each followed by its value

local KEY = ROOT .. 'policy'
local version = ARGV[1]
local known = tonumber(redis.call('HGET', KEY, 'version') or '0')

local function differs()
    for i = 2, #ARGV, 2 do
        if (redis.call('HGET', KEY, ARGV[i]) or '') ~= ARGV[i + 1] then return true end
    end
    return false
end

local function set(its_version)
    redis.call('HSET', KEY, 'version', its_version)
    for i = 2, #ARGV, 2 do
        if ARGV[i + 1] == '' then
            redis.call('HDEL', KEY, ARGV[i])
        else
            redis.call('HSET', KEY, ARGV[i], ARGV[i + 1])
        end
    end
end

if version == '' and differs() then
    -- The version is a time and not a counter, so that a version that the server lost with its last
    -- second of writes is never used again.
    set(digits(math.max(now(), known + 1)))
elseif version ~= '' and tonumber(version) > known then
    redis.call('DEL', KEY)
    set(version)
end
return redis.call('HGETALL', KEY)
