-- Examines items of the ledger, and changes nothing. An item is three values: its kind, a request
-- id or the hash of a chunk, and a name. Returns for each item, or false if the item no longer
-- exists:
--   r, id, ''          of a request: the entry, then max_tokens, finished_by, 1 if its gateway owns
--                      it else 0, 1 if all its listings have it at its arrival else 0, its events,
--                      its keys without a time to live, its keys that do not exist
--   s, id, key         of a key whose request does not exist: ''
--   o, id, gateway     of a request that the gateway owns: its state and owner; '' and '' if the
--                      request does not exist
--   a, id, key         of a request in the listing of a tenant or session: 1 if the sweep will remove
--                      it from that listing when it no longer exists, else 0
--   c, hash, ''        of a chunk: 1 if the chunk before it exists or it is the first one, else 0
-- ARGV: for each item these three values

local function is_listed(id)
    local arrived = redis.call('HGET', request_key(id), 'arrived')
    for _, key in ipairs(listings(id)) do
        local score = redis.call('ZSCORE', key, id)
        if not score or tonumber(score) ~= tonumber(arrived) then return 0 end
    end
    return 1
end

local function request(id)
    if redis.call('EXISTS', request_key(id)) == 0 then return false end
    local gateway, max_tokens, finished_by = unpack(redis.call(
        'HMGET', request_key(id), 'gateway', 'max_tokens', 'finished_by'))
    local immortal, missing = {}, {}
    for _, key in ipairs(all_keys(id)) do
        local left = redis.call('PTTL', key)
        local names = left == -1 and immortal or left == -2 and missing or {}
        names[#names + 1] = key:sub(#ROOT + 1)
    end
    local tail, images = unpack(redis.call('HMGET', request_key(id), 'tail', 'images'))
    each_hash(tail .. (images or ''), function(hash)
        if redis.call('EXISTS', chunk_key(hash)) == 0 then missing[#missing + 1] = 'c:' .. hash end
    end)
    local owned = redis.call('SISMEMBER', ROOT .. 'owned:' .. gateway, id)
    local events = redis.call('LRANGE', events_key(id), 0, -1)
    return {
        entry(id), max_tokens, finished_by or '0', owned, is_listed(id), events, immortal, missing,
    }
end

local function stray(id, name)
    local is_there = redis.call('EXISTS', ROOT .. name) == 1
    return is_there and redis.call('EXISTS', request_key(id)) == 0 and ''
end

local function claim(id, gateway)
    if redis.call('SISMEMBER', ROOT .. 'owned:' .. gateway, id) == 0 then return false end
    local state, owner = unpack(redis.call('HMGET', request_key(id), 'state', 'gateway'))
    return {state or '', owner or ''}
end

local function listing(id, name)
    local key, is_its = ROOT .. name, false
    if not redis.call('ZSCORE', key, id) then return false end
    for _, its in ipairs(listings(id)) do is_its = is_its or its == key end
    return is_its and redis.call('ZSCORE', ROOT .. 'arrivals', id) and 1 or 0
end

local function chunk(hash)
    if redis.call('EXISTS', chunk_key(hash)) == 0 then return false end
    local before = redis.call('GETRANGE', chunk_key(hash), COUNT, COUNT + HASH - 1)
    return before == NO_CHUNK and 1 or redis.call('EXISTS', chunk_key(before))
end

local look = {r = request, s = stray, o = claim, a = listing, c = chunk}
local answers = {}
for i = 1, #ARGV, 3 do
    answers[#answers + 1] = look[ARGV[i]](ARGV[i + 1], ARGV[i + 2])
end
return answers
