-- What every script of the ledger begins with: this text is put in front of each of them.
--
-- Keys. KEYS[1] is the root "<prefix>:<schema>:{<shard>}:"; every key that a script touches is that
-- root and a name, so that Redis Cluster has them all on one node.
--
--   r:<request id>           HASH    a request: ENTRY below, and
--                                      body          hash of what shapes the result
--                                      request       StoredRequest, its deadline left out
--                                      deadline      µs, or empty
--                                      max_tokens    most tokens that may be appended
--                                      call          nonce of the open or take over that came last,
--                                                    or empty
--                                      finished_by   epoch whose append finished it
--                                      logprobs      1 if there are keys for log probabilities
--                                      explanation   where its time went, as its gateway told it last; not there
--                                                    before that
--   t:<request id>:<choice>  STRING  generated tokens, uint32 little endian: offset = byte / 4
--   l:<request id>:<choice>  STRING  their log probabilities, one record a token (codec.py)
--   p:<request id>           STRING  those of the prompt's tokens from the second on, or empty
--   e:<request id>           LIST    its last moves: "<µs> <move> <detail>"
--   f:<nonce>                STRING  empty: this call of forget was made
--   g:<hash of id, arrival>  STRING  empty: this request was forgotten, and is not told again
--   h:<hash of id>           STRING  empty: a request of this id was forgotten, not lost
--   owned:<gateway>          SET     unfinished requests of a gateway
--   owners                   SET     gateways that own some
--   arrivals                 ZSET    requests, by arrival (µs): what listings go through
--   arrivals:<tenant>        ZSET    those of one tenant, where tenants are told apart
--   swept                    STRING  rank in `arrivals` to which the sweep has come
--   term                     HASH    term of the newest leader, and since when (µs)
--   slots:<tenant>           ZSET    its unfinished requests, where it has limits -> until when each counts
--                                    unless it is held again (µs)
--   charges:<tenant>         HASH    of these requests, what each took:
--                                    "<call> <prompt tokens> <tokens> <requests a minute> <tokens a minute>"
--   buckets:<tenant>         HASH    requests, tokens: when each bucket is full again (µs)
--
-- On shard 0 alone, for the whole cluster:
--
--   leases                   ZSET    gateway -> end of its lease (µs)
--   addresses                HASH    gateway -> internal address
--   leader                   HASH    router, address, term, since and ends (µs)
--   workers                  HASH    worker id -> WorkerInfo
--   worker_addresses         HASH    worker id -> address in its WorkerInfo, no address twice
--   workers_version          STRING  µs of the worker table's last change
--   last_worker              STRING  WorkerInfo of the worker that came last, though it is gone
--   load                     HASH    load: ClusterLoad, moment: µs when its leader said so
--   scaling                  HASH    scaling: Scaling, moment: µs when the autoscaler said so
--   policy                   HASH    what was set of the queue, by the settings' names, and version: µs of the last change
--   access                   HASH    keys and limits of tenants by their names (router/auth/document.py)
--   access_version           STRING  µs of their last change
--
-- What belongs to a tenant is on the shard of its name.
--
-- Lua's numbers are doubles. Moments in µs stay below 2^53 and are exact. Epochs and terms are
-- 64-bit nonces: they are passed, stored and compared as text, and never become numbers.
-- `finishes` has one letter a choice, - while it goes on; so its length is the number of choices.
-- `moves` counts them; `tally` is four numbers, the fields of Tally.

local ROOT = KEYS[1]

local ENTRY = {
    'finishes', 'state', 'gateway', 'arrived', 'worker', 'epoch', 'attempts', 'losses',
    'error_slug', 'error_message', 'moves', 'tally',
}

local function request_key(id) return ROOT .. 'r:' .. id end

local function tokens_key(id, choice) return ROOT .. 't:' .. id .. ':' .. choice end

local function logprobs_key(id, choice) return ROOT .. 'l:' .. id .. ':' .. choice end

local function prompt_logprobs_key(id) return ROOT .. 'p:' .. id end

local function grave_key(id, arrived) return ROOT .. 'g:' .. redis.sha1hex(id .. ' ' .. arrived) end

local function forgotten_key(id) return ROOT .. 'h:' .. redis.sha1hex(id) end

-- The answer about a request that is not there: unknown, or erased by forget.
local function unknown(id)
    return {redis.call('EXISTS', forgotten_key(id)) == 1 and 'erased' or 'unknown'}
end

local function events_key(id) return ROOT .. 'e:' .. id end

local function num_choices(id) return redis.call('HSTRLEN', request_key(id), 'finishes') end

local function letter_of(choice, finishes) return finishes:sub(choice + 1, choice + 1) end

-- Every key of a request, those that are strings last.
local function all_keys(id)
    local finishes, logprobs = unpack(redis.call('HMGET', request_key(id), 'finishes', 'logprobs'))
    local keys = {request_key(id), events_key(id)}
    for choice = 0, #finishes - 1 do keys[#keys + 1] = tokens_key(id, choice) end
    if logprobs == '1' then
        for choice = 0, #finishes - 1 do keys[#keys + 1] = logprobs_key(id, choice) end
        keys[#keys + 1] = prompt_logprobs_key(id)
    end
    return keys
end

-- Microseconds since 1970.
local function now()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end

-- All digits of a whole number; tostring keeps 14.
local function digits(number) return string.format('%.0f', number) end

-- A server that is full refuses a script's first write if that needs memory, and none after it. What
-- changes a few fields that are there already begins with this one, which needs none.
local function write_though_full() redis.call('DEL', ROOT .. 'nothing') end

local function is_final(state) return state ~= 'queued' and state ~= 'running' end

-- The fields of ENTRY and the number of tokens of each choice.
local function entry(id)
    local fields = redis.call('HMGET', request_key(id), unpack(ENTRY))
    for choice = 0, #fields[1] - 1 do
        fields[#fields + 1] = redis.call('STRLEN', tokens_key(id, choice)) / 4
    end
    return fields
end

-- Tokens and log probabilities of a choice from `offset` on.
local function stored_choice(id, choice, offset)
    local key, its_logprobs = tokens_key(id, choice), logprobs_key(id, choice)
    local num_tokens = redis.call('STRLEN', key) / 4
    local record = num_tokens == 0 and 0 or redis.call('STRLEN', its_logprobs) / num_tokens
    return {
        redis.call('GETRANGE', key, digits(offset * 4), -1),
        redis.call('GETRANGE', its_logprobs, digits(offset * record), -1),
    }
end

-- The entry, and what goes on with it takes: request, deadline, choices each from its offset on (0
-- where `offsets` ends), log probabilities of the prompt, now, explanation.
local function continuation(id, offsets)
    local request, deadline, explanation = unpack(redis.call(
        'HMGET', request_key(id), 'request', 'deadline', 'explanation'))
    local choices = {}
    for choice = 0, num_choices(id) - 1 do
        choices[#choices + 1] = stored_choice(id, choice, offsets[choice + 1] or 0)
    end
    local prompt = redis.call('GETRANGE', prompt_logprobs_key(id), 0, -1)
    return {'ok', entry(id), request, deadline, choices, prompt, digits(now()), explanation or ''}
end

local function own(id, gateway)
    redis.call('SADD', ROOT .. 'owned:' .. gateway, id)
    redis.call('SADD', ROOT .. 'owners', gateway)
end

local function disown(id, gateway)
    redis.call('SREM', ROOT .. 'owned:' .. gateway, id)
    if redis.call('EXISTS', ROOT .. 'owned:' .. gateway) == 0 then
        redis.call('SREM', ROOT .. 'owners', gateway)
    end
end

-- The sets in which a request is listed.
local function listings(id)
    local all, tenant = ROOT .. 'arrivals', id:match('^(.*)/')
    return tenant and {all, all .. ':' .. tenant} or {all}
end

local function list(id, arrived)
    for _, key in ipairs(listings(id)) do redis.call('ZADD', key, arrived, id) end
end

local function unlist(id)
    for _, key in ipairs(listings(id)) do redis.call('ZREM', key, id) end
end

-- Takes those out of the listings whose keys expired, among the next `count` in turn.
local function sweep(count)
    local before = tonumber(redis.call('GET', ROOT .. 'swept') or 0)
    local ids, rank = redis.call('ZRANGE', ROOT .. 'arrivals', before, before + count - 1), before
    for _, id in ipairs(ids) do
        if redis.call('EXISTS', request_key(id)) == 1 then rank = rank + 1 else unlist(id) end
    end
    if #ids < count then rank = 0 end
    if rank ~= before then redis.call('SET', ROOT .. 'swept', rank) end
end

-- A request that waits for its first worker, with what else is to be set.
local function create(id, gateway, n, ...)
    redis.call('HSET', request_key(id),
        'state', 'queued', 'gateway', gateway, 'worker', '', 'epoch', '0', 'attempts', 0,
        'losses', 0, 'finishes', ('-'):rep(n), 'error_slug', '', 'error_message', '',
        'tally', '0 0 0 0', ...)
    -- Empty, so that each has its time to live before the first append.
    local keys = all_keys(id)
    for i = 3, #keys do redis.call('SET', keys[i], '') end
    own(id, gateway)
end

-- Adds a move's event, and drops the first one of too many. The move itself counts in `moves`.
local function note(id, move, detail)
    local event = digits(now()) .. ' ' .. move .. ' ' .. detail
    if redis.call('RPUSH', events_key(id), event) > MAX_EVENTS then
        redis.call('LPOP', events_key(id))
    end
end

local function leads(term) return redis.call('HGET', ROOT .. 'term', 'term') == term end

-- What waits has a worker under a fresh epoch.
local function run(id, worker, epoch, attempts, moves)
    redis.call('HSET', request_key(id), 'state', 'running', 'worker', worker, 'epoch', epoch,
        'attempts', attempts, 'moves', moves)
    note(id, 'dispatch', worker)
end

-- Appends what lies beyond the `known` bytes of a choice, of tokens of which the first one is at byte
-- `offset`; `logprobs` has a record for each of them, all of the same size, or nothing.
local function extend(id, choice, known, offset, tokens, logprobs)
    local fresh = tokens:sub(known - offset + 1)
    if fresh == '' then return end
    redis.call('APPEND', tokens_key(id, choice), fresh)
    if logprobs ~= '' then
        local from = (known - offset) * #logprobs / #tokens
        redis.call('APPEND', logprobs_key(id, choice), logprobs:sub(from + 1))
    end
end

local function store_prompt_once(id, prompt_logprobs)
    if redis.call('STRLEN', prompt_logprobs_key(id)) == 0 then
        redis.call('APPEND', prompt_logprobs_key(id), prompt_logprobs)
    end
end

local function keep_for(id, ms)
    for _, key in ipairs(all_keys(id)) do redis.call('PEXPIRE', key, ms) end
end

-- Where its time went; what was told before stays where nothing is told. After a move's first write.
local function explain(id, explanation)
    if explanation ~= '' then redis.call('HSET', request_key(id), 'explanation', explanation) end
end

-- The two moves below begin with a write that needs no memory: what lets go of a request always works.

-- queued or running -> a final state, with what else is to be set.
local function finish(id, gateway, state, retention_ms, ...)
    keep_for(id, retention_ms)
    disown(id, gateway)
    redis.call('HSET', request_key(id), 'state', state, 'worker', '', 'epoch', '0', ...)
end

-- running -> queued, with what else is to be set.
local function queue(id, unfinished_ms, ...)
    keep_for(id, unfinished_ms)
    redis.call('HSET', request_key(id), 'state', 'queued', 'worker', '', 'epoch', '0', ...)
end

local function slots_key(tenant) return ROOT .. 'slots:' .. tenant end

local function charges_key(tenant) return ROOT .. 'charges:' .. tenant end

local function buckets_key(tenant) return ROOT .. 'buckets:' .. tenant end

local MINUTE = 60 * 1000000

-- In how many µs a bucket is filled by `amount`.
local function cost(amount, a_minute) return math.floor(amount * MINUTE / a_minute) end

-- What nobody holds any more goes after the last lease.
local function keep_slots(tenant, lease)
    local ms = digits(math.ceil(lease / 1000) + 1000)
    redis.call('PEXPIRE', slots_key(tenant), ms)
    redis.call('PEXPIRE', charges_key(tenant), ms)
end
