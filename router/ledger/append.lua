-- running -> running, or with a finish reason -> finished. Answers one word of Appended an item.
-- ARGV: retention_ms, and for each item: id, epoch, offset, tokens, finish reason or ''

local retention_ms = ARGV[1]

-- A finish that came a second time because its answer was lost.
local function is_repeated(id, epoch, last, finish_reason)
    local by, reason = unpack(redis.call('HMGET', request_key(id), 'finished_by', 'finish_reason'))
    return by == epoch and reason == finish_reason and last <= redis.call('STRLEN', tokens_key(id))
end

-- Stores what lies beyond the tokens that are known. All positions are in bytes.
local function store(key, offset, tokens, max_bytes)
    local known = redis.call('STRLEN', key)
    if offset > known then return 'gap' end
    local fresh = tokens:sub(known - offset + 1)
    if known + #fresh > max_bytes then return 'limit' end
    if #fresh > 0 then redis.call('APPEND', key, fresh) end
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
    local answer = store(tokens_key(id), offset * 4, tokens, max_tokens * 4)
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
