-- Sets what holds of the admission queue; an empty order or 0 goes back to the configuration, and what is
-- not named stays.
-- A version that is given is one that was set before: it changes nothing unless it is newer than what is
-- known. Answers order, max_queued and version as they are then.
-- ARGV: version or '', and for each field its name and its value

local version = ARGV[1]
local known = {order = '', max_queued = '0', version = '0'}
local KEY = ROOT .. 'policy'
for name in pairs(known) do known[name] = redis.call('HGET', KEY, name) or known[name] end

local function differs()
    for i = 2, #ARGV, 2 do
        if known[ARGV[i]] ~= ARGV[i + 1] then return true end
    end
    return false
end

local function set(its_version)
    known.version = its_version
    for i = 2, #ARGV, 2 do known[ARGV[i]] = ARGV[i + 1] end
    redis.call('HSET', KEY,
        'order', known.order, 'max_queued', known.max_queued, 'version', known.version)
end

if version == '' and differs() then
    -- A moment, not a counter: one that was lost with the server's last second never comes again.
    set(digits(math.max(now(), known.version + 1)))
elseif version ~= '' and tonumber(version) > tonumber(known.version) then
    set(version)
end
return {known.order, known.max_queued, known.version}
