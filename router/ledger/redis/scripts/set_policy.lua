-- Sets what holds of queue and engines, name by name; '' takes back, and what is not named stays.
-- A version that is given is one that was set before, with all that it had: it takes the place of what is
-- known if that is older, and else changes nothing. Answers names and values as they are then, version among
-- them.
-- ARGV: version or '', and names, each with its value

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
    -- A moment, not a counter: one that was lost with the server's last second never comes again.
    set(digits(math.max(now(), known + 1)))
elseif version ~= '' and tonumber(version) > known then
    redis.call('DEL', KEY)
    set(version)
end
return redis.call('HGETALL', KEY)
