-- running -> running, or with a finish reason -> finished. Answers one word of Appended an item.
-- ARGV: retention_ms, and for each item: id, epoch, offset, tokens, finish reason or ''

local retention_ms = ARGV[1]

-- A finish that came a second time because its answer was lost.
local function is_repeated(id, epoch, last, finish_reason)
    local by, reason = unpack(redis.call('HMGET', request_key(id), 'finished_by', 'finish_reason'))
    return by == epoch and reason == finish_reason and last <= redis.call('STRLEN', tokens_key(id))
end

-- Stores what lies beyond `stored`. All positions are in bytes.
local function store(id, offset, tokens, stored, max_tokens)
    if offset > stored then return 'gap' end
    local fresh = tokens:sub(stored - offset + 1)
    if stored + #fresh > max_tokens * 4 then return 'limit' end
    if #fresh > 0 then redis.call('APPEND', tokens_key(id), fresh) end
    return 'ok'
end

local function append(id, epoch, offset, tokens, finish_reason)
    local known = redis.call('HMGET', request_key(id), 'state', 'epoch', 'max_tokens', 'gateway')
    local state, its_epoch, max_tokens, gateway = unpack(known)
    if not state then
        return 'unknown'
    elseif is_final(state) then
        local last = offset * 4 + #tokens
        return is_repeated(id, epoch, last, finish_reason) and 'ok' or 'ended'
    elseif state ~= 'running' or its_epoch ~= epoch then
        return 'fenced'
    end
    local stored = redis.call('STRLEN', tokens_key(id))
    local answer = store(id, offset * 4, tokens, stored, max_tokens)
    if answer == 'ok' and finish_reason ~= '' then
        finish(id, gateway, 'finished', retention_ms,
            'finish_reason', finish_reason, 'finished_by', epoch)
    end
    return answer
end

local answers = {}
for i = 2, #ARGV, 5 do
    answers[#answers + 1] = append(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4])
end
return answers
