-- running -> running, or -> finished if the last unfinished choice ends. Returns a pair for each
-- item whose result is not ok: the number of the item, from 1, and its result, a value of Appended.
-- ARGV: retention_ms, and all items as one MessagePack array, because each separate argument would
--       cost the client as much time as a token. An item is id, epoch, offset, tokens, and then ''
--       if the tokens are of choice 0 and the item has nothing else. Otherwise 'more' follows, and:
--       choice, letter of its end or '', logprobs, prompt_logprobs, tally or '', the explanation
--       that is sent with an end, or '', and the request that replaces the stored one, or ''. All of
--       these but the offset are text.

local retention_ms = ARGV[1]

-- Return whether an append repeats a stored end, because the answer to the first one was lost.
local function is_repeated(id, choice, last, letter, finishes)
    return letter == letter_of(choice, finishes)
        and last <= redis.call('STRLEN', tokens_key(id, choice))
end

-- Store the tokens that are not stored yet. All positions are in bytes.
local function store(id, choice, offset, tokens, logprobs, max_bytes)
    local known = redis.call('STRLEN', tokens_key(id, choice))
    if offset > known then return 'gap' end
    if offset + #tokens > max_bytes then return 'limit' end
    extend(id, choice, known, offset, tokens, logprobs)
    return 'ok'
end

local function end_choice(id, epoch, choice, letter, finishes, tally)
    finishes = finishes:sub(1, choice) .. letter .. finishes:sub(choice + 2)
    local changes = {'finishes', finishes}
    if tally ~= '' then changes[3], changes[4] = 'tally', tally end
    if finishes:find('-', 1, true) then
        redis.call('HSET', request_key(id), unpack(changes))
        return 'ok'
    end
    local gateway, moves = unpack(redis.call('HMGET', request_key(id), 'gateway', 'moves'))
    finish(id, gateway, 'finished', retention_ms,
        'finished_by', epoch, 'moves', moves + 1, unpack(changes))
    note(id, 'finish', '')
    return 'finished'
end

-- `choice` is text, because keys need text and converting numbers to text is costly.
local function append(id, epoch, offset, tokens, choice, letter, logprobs, prompt_logprobs, tally, explanation, request)
    local known = redis.call('HMGET', request_key(id), 'state', 'epoch', 'max_tokens', 'finishes')
    local state, its_epoch, max_tokens, finishes = unpack(known)
    if not state or choice ~= '0' and tonumber(choice) >= #finishes then
        return 'unknown'
    elseif is_final(state) then
        return redis.call('HGET', request_key(id), 'finished_by') == epoch
            and is_repeated(id, choice, offset * 4 + #tokens, letter, finishes)
            and 'finished' or 'ended'
    elseif state ~= 'running' or its_epoch ~= epoch then
        return 'fenced'
    elseif finishes ~= '-' and letter_of(choice, finishes) ~= '-' then
        local last = offset * 4 + #tokens
        return is_repeated(id, choice, last, letter, finishes) and 'ok' or 'ended'
    end
    local answer = store(id, choice, offset * 4, tokens, logprobs, max_tokens * 4)
    if answer ~= 'ok' then return answer end
    if request ~= '' then redis.call('HSET', request_key(id), 'request', request) end
    if prompt_logprobs ~= '' then store_prompt_once(id, prompt_logprobs) end
    if letter == '' and tally ~= '' then redis.call('HSET', request_key(id), 'tally', tally) end
    if letter == '' then return 'ok' end
    answer = end_choice(id, epoch, choice, letter, finishes, tally)
    explain(id, explanation)
    return answer
end

local items, answers = cmsgpack.unpack(ARGV[2]), {}
local i, number, last = 1, 0, #items
while i <= last do
    local id, epoch, offset, tokens = items[i], items[i + 1], items[i + 2], items[i + 3]
    local answer
    if items[i + 4] == '' then
        answer = append(id, epoch, offset, tokens, '0', '', '', '', '', '', '')
        i = i + 5
    else
        answer = append(id, epoch, offset, tokens, unpack(items, i + 5, i + 11))
        i = i + 12
    end
    number = number + 1
    if answer ~= 'ok' then
        answers[#answers + 1], answers[#answers + 2] = number, answer
    end
end
return answers
