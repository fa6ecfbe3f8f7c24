-- running -> running, or with the end of the last choice that went on -> finished. Answers one word of
-- Appended an item.
-- ARGV: retention_ms, and for each item: id, epoch, offset, tokens, and '' if they are of choice 0 and
--       that is all, else 'more' and: choice, letter of its end or '', logprobs, prompt_logprobs

local retention_ms = ARGV[1]

local function letter_of(choice, finishes) return finishes:sub(choice + 1, choice + 1) end

-- An end that came a second time because its answer was lost.
local function is_repeated(id, choice, last, letter, finishes)
    return letter == letter_of(choice, finishes)
        and last <= redis.call('STRLEN', tokens_key(id, choice))
end

-- Stores what lies beyond the tokens that are known. All positions are in bytes; `logprobs` has a
-- record for each token, all of the same size, or nothing.
local function store(id, choice, offset, tokens, logprobs, max_bytes)
    local key = tokens_key(id, choice)
    local known = redis.call('STRLEN', key)
    if offset > known then return 'gap' end
    local fresh = tokens:sub(known - offset + 1)
    if known + #fresh > max_bytes then return 'limit' end
    if #fresh > 0 then
        redis.call('APPEND', key, fresh)
        if logprobs ~= '' then
            local from = (known - offset) * #logprobs / #tokens
            redis.call('APPEND', logprobs_key(id, choice), logprobs:sub(from + 1))
        end
    end
    return 'ok'
end

local function store_prompt_once(id, prompt_logprobs)
    if redis.call('STRLEN', prompt_logprobs_key(id)) == 0 then
        redis.call('APPEND', prompt_logprobs_key(id), prompt_logprobs)
    end
end

local function end_choice(id, epoch, choice, letter, finishes)
    finishes = finishes:sub(1, choice) .. letter .. finishes:sub(choice + 2)
    if finishes:find('-', 1, true) then
        redis.call('HSET', request_key(id), 'finishes', finishes)
        return 'ok'
    end
    finish(id, redis.call('HGET', request_key(id), 'gateway'), 'finished', retention_ms,
        'finishes', finishes, 'finished_by', epoch)
    return 'finished'
end

-- `choice` is text, as keys need it; numbers are costly to write down.
local function append(id, epoch, offset, tokens, choice, letter, logprobs, prompt_logprobs)
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
    if prompt_logprobs ~= '' then store_prompt_once(id, prompt_logprobs) end
    return letter == '' and 'ok' or end_choice(id, epoch, choice, letter, finishes)
end

local answers, num_arguments = {}, #ARGV
local i = 2
while i <= num_arguments do
    local id, epoch, offset, tokens = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
    if ARGV[i + 4] == '' then
        answers[#answers + 1] = append(id, epoch, offset, tokens, '0', '', '', '')
        i = i + 5
    else
        answers[#answers + 1] = append(id, epoch, offset, tokens, unpack(ARGV, i + 5, i + 8))
        i = i + 9
    end
end
return answers
