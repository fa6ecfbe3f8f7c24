-- (any) -> the state in its gateway's copy (`told`), after the server restarted without data that
-- it had acknowledged. Returns a value of Reasserted and, unless that is forgotten, the entry.
-- ARGV: id, the fields of ENTRY, deadline in µs or '', body, request, max_tokens, 1 if the request
--       has log probabilities else 0, retention_ms, unfinished_ms, prompt_logprobs, explanation,
--       turn, session or '', hashes and tokens of the prompt's chunks (see store_chunks), images
--       (see unpacked_images), and for each choice all its tokens and logprobs
--
-- The leader's term is not compared, because the copy has a dispatch that was already made, under
-- the term of that time. The epoch was chosen at random for this dispatch only. No other dispatch
-- has the same epoch: neither one that the server lost nor one that a leader has made since. The
-- entry keeps one epoch, and the scripts refuse appends under any other epoch.

local id = ARGV[1]
local told, fields = {}, {}
for i, name in ipairs(ENTRY) do
    told[name] = ARGV[i + 1]
    fields[2 * i - 1], fields[2 * i] = name, ARGV[i + 1]
end
local deadline, body, request, max_tokens, logprobs, retention_ms, unfinished_ms, prompt_logprobs, explanation, turn, session, hashes, tokens, images =
    unpack(ARGV, #ENTRY + 2, #ENTRY + 15)

local function told_choice(choice)
    local at = #ENTRY + 16 + 2 * choice
    return ARGV[at], ARGV[at + 1]
end

local function is_complete(finishes) return not finishes:find('-', 1, true) end

-- Return whether copy and ledger agree on a choice: on the tokens and the end that both have.
-- Neither may have tokens after the end that the other has.
local function agrees(choice, finishes)
    local its, known = told_choice(choice), redis.call('GETRANGE', tokens_key(id, choice), 0, -1)
    local its_end, known_end = letter_of(choice, told.finishes), letter_of(choice, finishes)
    local both = math.min(#its, #known)
    return its:sub(1, both) == known:sub(1, both)
        and (its_end == '-' or known_end == '-' or its_end == known_end)
        and (its_end == '-' or #known <= #its)
        and (known_end == '-' or #its <= #known)
end

local function judge(state, gateway, moves, its_body, finishes)
    if its_body ~= body then return 'diverged' end
    for choice = 0, #finishes - 1 do
        if not agrees(choice, finishes) then return 'diverged' end
    end
    if is_final(state) then
        return (is_final(told.state) or is_complete(told.finishes)) and 'ok' or 'ended'
    elseif gateway ~= told.gateway and moves >= tonumber(told.moves) then
        return 'taken'
    end
    return 'ok'
end

-- Return the end of each choice, from the ledger or, if the ledger has none, from the copy.
local function join(finishes)
    return (finishes:gsub('()%-', function(at) return told.finishes:sub(at, at) end))
end

local function add_tokens(finishes)
    for choice = 0, #finishes - 1 do
        local known = redis.call('STRLEN', tokens_key(id, choice))
        extend(id, choice, known, 0, told_choice(choice))
    end
    if prompt_logprobs ~= '' then store_prompt_once(id, prompt_logprobs) end
end

-- Set the fields of ENTRY, such as state and owner, and the deadline to those of the copy.
local function follow(gateway)
    redis.call('HSET', request_key(id), 'deadline', deadline, unpack(fields))
    disown(id, gateway)
    own(id, told.gateway)
    list(id, told.arrived)
    note(id, 'reassert', told.gateway)
    keep_for(id, unfinished_ms)
end

local function complete(gateway, was_noted)
    redis.call('HINCRBY', request_key(id), 'moves', 1)
    if not was_noted then note(id, 'reassert', told.gateway) end
    finish(id, gateway, 'finished', retention_ms, 'finished_by', told.epoch)
end

local function learn(state, gateway, moves, finishes)
    -- Another arrival is that of another request, whose prompt may have other tokens.
    if redis.call('HGET', request_key(id), 'arrived') == told.arrived then
        redis.call('HSET', request_key(id), 'request', request)
    end
    local knows_more = tonumber(told.moves) > moves
    if knows_more then
        follow(gateway)
        state, gateway = told.state, told.gateway
    end
    redis.call('HSET', request_key(id), 'finishes', finishes)
    add_tokens(finishes)
    if is_final(state) then
        finish(id, gateway, state, retention_ms)
    elseif is_complete(finishes) then
        complete(gateway, knows_more)
    end
    explain(id, explanation)
end

local function known()
    local state, gateway, moves, its_body, finishes = unpack(redis.call(
        'HMGET', request_key(id), 'state', 'gateway', 'moves', 'body', 'finishes'))
    return state, gateway, tonumber(moves), its_body, finishes
end

if redis.call('EXISTS', grave_key(id, told.arrived)) == 1 then
    return {'forgotten'}
end
if not known() then
    -- The new request has 0 moves and the copy has more, so `learn` sets all other fields from the
    -- copy.
    create(id, told.gateway, #told.finishes, session, {'', hashes, tokens}, unpacked_images(images),
        'body', body, 'request', request, 'turn', turn, 'max_tokens', max_tokens, 'call', '',
        'logprobs', logprobs, 'moves', 0)
end
local state, gateway, moves, its_body, finishes = known()
local answer = judge(state, gateway, moves, its_body, finishes)
if answer == 'ok' and not is_final(state) then
    learn(state, gateway, moves, join(finishes))
    answer = judge(known())
end
return {answer, entry(id)}
