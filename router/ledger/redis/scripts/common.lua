-- Common part of all scripts of the ledger: this text is prepended to each of them. A gateway is
-- the router that owns a request.
--
-- Keys. KEYS[1] is the root "<prefix>:<schema>:{<shard>}:". Every key that a script uses is this
-- root followed by a name, so that all of them are on the same node of a Redis Cluster. Only
-- active.lua uses KEYS[1] itself as its key.
--
--   r:<request id>           HASH    a request: the fields of ENTRY below, and
--                                      body          hash of everything that shapes the result
--                                      request       StoredRequest, without its deadline and the
--                                                    tokens of the prompt's chunks
--                                      tail          hash of the last chunk of the prompt, or empty
--                                      images        hashes of its images, one after the other
--                                      turn          PromptMark by which a router recognises that a
--                                                    prompt continues this request, as bytes that
--                                                    the scripts do not interpret; or empty
--                                      deadline      µs, or empty
--                                      max_tokens    maximum number of tokens of each choice
--                                      call          nonce of the last open or take_over, or empty
--                                      finished_by   epoch whose append finished the request
--                                      logprobs      1 if there are keys for log probabilities
--                                      explanation   time breakdown that the request's gateway
--                                                    reported last; absent before the first report
--   t:<request id>:<choice>  STRING  generated tokens, uint32 little endian: offset = byte / 4
--   l:<request id>:<choice>  STRING  log probabilities of these tokens, one record per token
--                                    (codec.py)
--   p:<request id>           STRING  log probabilities of the prompt's tokens from the second one
--                                    on, or empty
--   e:<request id>           LIST    last moves of the request: "<µs> <move> <detail>"
--   f:<nonce>                STRING  it exists if this call of forget, put_object or delete_object
--                                    was executed; version that put_object stored, or empty
--   g:<hash of id, arrival>  STRING  empty; it exists if this request was erased by forget, so that
--                                    reassert does not restore it
--   h:<hash of id>           STRING  empty; it exists if a request with this id was erased by
--                                    forget, so that scripts return erased instead of unknown
--   c:<hash>                 STRING  a chunk of 256 tokens of prompts: number of references to it,
--                                    in COUNT digits; hash of the chunk before it, or NO_CHUNK; its
--                                    tokens, as in t. Requests of which it is the last chunk refer
--                                    to it, and so do chunks that follow it. It is deleted with its
--                                    last reference. A hash depends on the salt at the opening of the
--                                    request, on the chunk's tokens and on all tokens before it. An
--                                    image is stored like the only chunk of a prompt, with the file
--                                    instead of tokens.
--   owned:<gateway>          SET     unfinished requests of a gateway
--   owners                   SET     gateways that own unfinished requests
--   arrivals                 ZSET    requests, by arrival (µs); listings read it
--   arrivals:<tenant>        ZSET    requests of one tenant, if tenants are distinguished
--   session:<session>        ZSET    requests of one session, by arrival (µs)
--   expiries                 ZSET    requests, by the time (µs) at which their keys expire
--   sessions                 HASH    request -> session, if it has one
--   tails                    HASH    request -> hash of the last chunk of its prompt, if it has one,
--                                    and the hashes of its images
--   garbage                  LIST    chunks without references that are still to be deleted
--   o:<name>                 HASH    an object: version, data
--   objects:<tenant/kind>    ZSET    names of objects, all with the score 0
--   object_expiries          ZSET    names of objects, by the time (µs) at which they expire
--   term                     HASH    term of the newest leader, and the start of the term (µs)
--   slots:<tenant>           ZSET    unfinished requests of a tenant that has limits -> time (µs)
--                                    until which each counts as a concurrent request, unless
--                                    hold.lua extends this time
--   charges:<tenant>         HASH    charge of each of these requests: "<call> <prompt tokens>
--                                    <tokens> <requests per minute> <tokens per minute>"
--   buckets:<tenant>         HASH    requests, tokens: time (µs) at which each bucket is full again
--
-- On shard 0 only, for the whole cluster:
--
--   leases                   ZSET    gateway -> end of its lease (µs)
--   addresses                HASH    gateway -> internal address
--   leader                   HASH    router, address, term, since and ends (µs)
--   workers                  HASH    worker id -> WorkerInfo
--   worker_addresses         HASH    worker id -> address in its WorkerInfo; each address is unique
--   workers_version          STRING  time (µs) of the last change of the worker table
--   last_worker              STRING  WorkerInfo of the worker that registered last; it is kept when
--                                    the worker is gone
--   load                     HASH    load: ClusterLoad, moment: time (µs) of the leader's report
--   scaling                  HASH    scaling: Scaling, moment: time (µs) of the autoscaler's report
--   policy                   HASH    settings of queue and engines that operators set, by name, and
--                                    version: time (µs) of the last change
--   access                   HASH    records of API keys and tenants, by name
--                                    (router/auth/document.py)
--   access_version           STRING  time (µs) of the last change of these records
--
-- The keys slots, charges and buckets of a tenant are on the shard of the tenant's name.
--
-- Lua's numbers are doubles. Times in µs are below 2^53 and therefore exact. Epochs and terms are
-- 64-bit nonces: they are passed, stored and compared as text, and never become numbers. `finishes`
-- has one letter per choice, which is - while the choice is unfinished. Its length is the number of
-- choices. `moves` is the number of moves of the request; `tally` is four numbers, the fields of
-- Tally.

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

-- Return the answer for a request that does not exist: erased if forget erased it, else unknown.
local function unknown(id)
    return {redis.call('EXISTS', forgotten_key(id)) == 1 and 'erased' or 'unknown'}
end

local function events_key(id) return ROOT .. 'e:' .. id end

local function num_choices(id) return redis.call('HSTRLEN', request_key(id), 'finishes') end

local function letter_of(choice, finishes) return finishes:sub(choice + 1, choice + 1) end

-- Return all keys of a request. The first two are a hash and a list, all others are strings.
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

-- Return the time in microseconds since 1970.
local function now()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end

-- Return all digits of a whole number; tostring keeps only 14.
local function digits(number) return string.format('%.0f', number) end

-- A full server refuses the first write of a script if that write needs memory, and no later write.
-- Scripts that change only a few existing fields begin with this write, which needs no memory.
local function write_though_full() redis.call('DEL', ROOT .. 'nothing') end

local function is_final(state) return state ~= 'queued' and state ~= 'running' end

-- Return the fields of ENTRY, followed by the number of tokens of each choice.
local function entry(id)
    local fields = redis.call('HMGET', request_key(id), unpack(ENTRY))
    for choice = 0, #fields[1] - 1 do
        fields[#fields + 1] = redis.call('STRLEN', tokens_key(id, choice)) / 4
    end
    return fields
end

-- Return the tokens and the log probabilities of a choice from `offset` on.
local function stored_choice(id, choice, offset)
    local key, its_logprobs = tokens_key(id, choice), logprobs_key(id, choice)
    local num_tokens = redis.call('STRLEN', key) / 4
    local record = num_tokens == 0 and 0 or redis.call('STRLEN', its_logprobs) / num_tokens
    return {
        redis.call('GETRANGE', key, digits(offset * 4), -1),
        redis.call('GETRANGE', its_logprobs, digits(offset * record), -1),
    }
end

local HASH, COUNT = 32, 8
local NO_CHUNK = ('0'):rep(HASH)

local function chunk_key(hash) return ROOT .. 'c:' .. hash end

-- Add `by` to the number of references to a chunk, and return the new number, or nil if the chunk
-- does not exist.
local function refer(hash, by)
    local count = tonumber(redis.call('GETRANGE', chunk_key(hash), 0, COUNT - 1))
    if not count then return nil end
    redis.call('SETRANGE', chunk_key(hash), 0, ('%08d'):format(count + by))
    return count + by
end

-- Delete chunks without references: `hash`, and the chunks before it that then have none. The rest
-- is left in `garbage` after `limit` deletions. Returns how many more deletions `limit` allows.
local function delete_chunks(hash, limit)
    while hash ~= NO_CHUNK do
        if limit == 0 then
            redis.call('RPUSH', ROOT .. 'garbage', hash)
            return 0
        end
        local before = redis.call('GETRANGE', chunk_key(hash), COUNT, COUNT + HASH - 1)
        redis.call('DEL', chunk_key(hash))
        limit = limit - 1
        if refer(before, -1) ~= 0 then return limit end
        hash = before
    end
    return limit
end

-- Store those chunks of a prompt that are not stored yet, and return the hash of the prompt's last
-- chunk, or an empty text if the prompt has none. `hashes` has the hashes and `tokens` the tokens
-- of the chunks after the chunk `base`, or of all chunks if `base` is empty.
local function store_chunks(base, hashes, tokens)
    local num_chunks = #hashes / HASH
    local size, last, next = #tokens / num_chunks, base, 1
    local function hash(i) return hashes:sub((i - 1) * HASH + 1, i * HASH) end
    while next <= num_chunks and redis.call('EXISTS', chunk_key(hash(next))) == 1 do
        last, next = hash(next), next + 1
    end
    -- A stored chunk implies that all chunks before it are stored. The chunk `next` is not stored,
    -- so those after it are not stored either.
    if next <= num_chunks then refer(last, 1) end
    for i = next, num_chunks do
        local before = last == '' and NO_CHUNK or last
        local count = ('%08d'):format(i < num_chunks and 1 or 0)
        redis.call('SET', chunk_key(hash(i)),
            count .. before .. tokens:sub((i - 1) * size + 1, i * size))
        last = hash(i)
    end
    return last
end

-- Call `use` with each hash in a text of hashes.
local function each_hash(hashes, use)
    for at = 1, #hashes, HASH do use(hashes:sub(at, at + HASH - 1)) end
end

-- Return the hashes and files in the argument that contains the images of a request: a MessagePack
-- array of pairs, or an empty text.
local function unpacked_images(images) return images == '' and {} or cmsgpack.unpack(images) end

-- Return whether an image is neither stored nor has a file in `images`.
local function lacks_image(images)
    for i = 1, #images, 2 do
        if images[i + 1] == '' and redis.call('EXISTS', chunk_key(images[i])) == 0 then
            return true
        end
    end
    return false
end

-- Store those images that are not stored yet, and return the hashes of all of them.
local function store_images(images)
    local hashes = ''
    for i = 1, #images, 2 do
        if redis.call('EXISTS', chunk_key(images[i])) == 0 then
            redis.call('SET', chunk_key(images[i]), ('0'):rep(COUNT) .. NO_CHUNK .. images[i + 1])
        end
        hashes = hashes .. images[i]
    end
    return hashes
end

local function stored_images(hashes)
    local files = {}
    each_hash(hashes, function(hash)
        files[#files + 1] = redis.call('GETRANGE', chunk_key(hash), COUNT + HASH, -1)
    end)
    return files
end

-- Return the tokens of the chunks of a prompt, last chunk first.
local function stored_chunks(tail)
    local chunks = {}
    while tail and tail ~= '' and tail ~= NO_CHUNK do
        local chunk = redis.call('GETRANGE', chunk_key(tail), COUNT, -1)
        chunks[#chunks + 1], tail = chunk:sub(HASH + 1), chunk:sub(1, HASH)
    end
    return chunks
end

-- Delete those chunks and images of a prompt that no other prompt has; at most `limit` of them at
-- once.
local function release_prompt(id, limit)
    local tails = redis.call('HGET', ROOT .. 'tails', id)
    if not tails then return limit end
    redis.call('HDEL', ROOT .. 'tails', id)
    each_hash(tails, function(hash)
        if refer(hash, -1) == 0 then limit = delete_chunks(hash, limit) end
    end)
    return limit
end

-- Return ok, the entry, and what a gateway needs to continue the request: request, deadline, each
-- choice from its offset on (0 if `offsets` has none for it), log probabilities of the prompt, the
-- current time, explanation, tokens of the prompt's chunks, last chunk first, files of the images.
local function continuation(id, offsets)
    local request, deadline, explanation, tail, images = unpack(redis.call(
        'HMGET', request_key(id), 'request', 'deadline', 'explanation', 'tail', 'images'))
    local choices = {}
    for choice = 0, num_choices(id) - 1 do
        choices[#choices + 1] = stored_choice(id, choice, offsets[choice + 1] or 0)
    end
    local prompt = redis.call('GETRANGE', prompt_logprobs_key(id), 0, -1)
    return {'ok', entry(id), request, deadline, choices, prompt, digits(now()), explanation or '',
        stored_chunks(tail), stored_images(images or '')}
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

-- Return the keys of the listings that contain a request.
local function listings(id)
    local all, tenant = ROOT .. 'arrivals', id:match('^(.*)/')
    local keys = tenant and {all, all .. ':' .. tenant} or {all}
    local session = redis.call('HGET', ROOT .. 'sessions', id)
    if session then keys[#keys + 1] = ROOT .. 'session:' .. session end
    return keys
end

local function list(id, arrived)
    for _, key in ipairs(listings(id)) do redis.call('ZADD', key, arrived, id) end
end

-- Remove what remains of a request whose keys were deleted or have expired. At most `limit` chunks
-- of its prompt are deleted at once.
local function unlist(id, limit)
    for _, key in ipairs(listings(id)) do redis.call('ZREM', key, id) end
    redis.call('ZREM', ROOT .. 'expiries', id)
    redis.call('HDEL', ROOT .. 'sessions', id)
    return release_prompt(id, limit)
end

-- Number of chunks that one sweep deletes, which takes about a millisecond.
local SWEPT_CHUNKS = 512

-- Remove what remains of up to `count` requests whose keys have expired, and some garbage.
local function sweep(count)
    local due = redis.call(
        'ZRANGEBYSCORE', ROOT .. 'expiries', '-inf', digits(now()), 'LIMIT', 0, count)
    local limit = SWEPT_CHUNKS
    for _, id in ipairs(due) do
        if redis.call('EXISTS', request_key(id)) == 0 then limit = unlist(id, limit) end
    end
    while limit > 0 do
        local hash = redis.call('LPOP', ROOT .. 'garbage')
        if not hash then return end
        -- A new prompt may refer to the chunk since it became garbage.
        if refer(hash, 0) == 0 then limit = delete_chunks(hash, limit) end
    end
end

local function call_key(call) return ROOT .. 'f:' .. call end

local function object_key(name) return ROOT .. 'o:' .. name end

-- Return the key of the listing that contains an object.
local function collection_key(name) return ROOT .. 'objects:' .. name:match('^(.*)/') end

-- Remove an object that was deleted or has expired from the listings.
local function unlist_object(name)
    redis.call('ZREM', collection_key(name), name)
    redis.call('ZREM', ROOT .. 'object_expiries', name)
end

-- Remove up to `count` expired objects from the listings.
local function sweep_objects(count)
    local due = redis.call(
        'ZRANGEBYSCORE', ROOT .. 'object_expiries', '-inf', digits(now()), 'LIMIT', 0, count)
    for _, name in ipairs(due) do
        if redis.call('EXISTS', object_key(name)) == 0 then unlist_object(name) end
    end
end

-- Create a queued request that has not run. `chunks` is a list of the arguments of store_chunks,
-- `images` has the hashes and files of its images. The further arguments are names and values of
-- fields.
local function create(id, gateway, n, session, chunks, images, ...)
    -- The chunks come first, because a full server refuses only the first write.
    local tail, hashes = store_chunks(unpack(chunks)), store_images(images)
    local tails = tail .. hashes
    redis.call('HSET', request_key(id),
        'state', 'queued', 'gateway', gateway, 'worker', '', 'epoch', '0', 'attempts', 0,
        'losses', 0, 'finishes', ('-'):rep(n), 'error_slug', '', 'error_message', '',
        'tally', '0 0 0 0', 'tail', tail, 'images', hashes, ...)
    each_hash(tails, function(hash) refer(hash, 1) end)
    -- An earlier request with this id may have expired without having been swept yet.
    if redis.call('ZSCORE', ROOT .. 'expiries', id) then unlist(id, SWEPT_CHUNKS) end
    if tails ~= '' then redis.call('HSET', ROOT .. 'tails', id, tails) end
    if session ~= '' then redis.call('HSET', ROOT .. 'sessions', id, session) end
    -- Create the string keys as empty, so that they can get a time to live before the first append.
    local keys = all_keys(id)
    for i = 3, #keys do redis.call('SET', keys[i], '') end
    own(id, gateway)
end

-- Add the event of a move, and drop the oldest event if there are too many. The caller counts the
-- move in `moves`.
local function note(id, move, detail)
    local event = digits(now()) .. ' ' .. move .. ' ' .. detail
    if redis.call('RPUSH', events_key(id), event) > MAX_EVENTS then
        redis.call('LPOP', events_key(id))
    end
end

local function leads(term) return redis.call('HGET', ROOT .. 'term', 'term') == term end

-- queued -> running: record that a worker has the request under a fresh epoch.
local function run(id, worker, epoch, attempts, moves)
    redis.call('HSET', request_key(id), 'state', 'running', 'worker', worker, 'epoch', epoch,
        'attempts', attempts, 'moves', moves)
    note(id, 'dispatch', worker)
end

-- Append the part of `tokens` that is beyond the `known` bytes of a choice. The first of `tokens`
-- is at byte `offset`. `logprobs` has one record for each token, all of the same size, or is empty.
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
    redis.call('ZADD', ROOT .. 'expiries', digits(now() + ms * 1000), id)
end

-- Store a time breakdown; if it is empty, keep the stored one. Call this after the first write of a
-- move, because a full server refuses only the first write.
local function explain(id, explanation)
    if explanation ~= '' then redis.call('HSET', request_key(id), 'explanation', explanation) end
end

-- The two functions below begin with a write that needs no memory, so that a full server accepts
-- them. Their further arguments are names and values of fields of the request.

-- queued or running -> a final state.
local function finish(id, gateway, state, retention_ms, ...)
    keep_for(id, retention_ms)
    disown(id, gateway)
    redis.call('HSET', request_key(id), 'state', state, 'worker', '', 'epoch', '0', ...)
end

-- queued or running -> queued.
local function queue(id, unfinished_ms, ...)
    keep_for(id, unfinished_ms)
    redis.call('HSET', request_key(id), 'state', 'queued', 'worker', '', 'epoch', '0', ...)
end

local function slots_key(tenant) return ROOT .. 'slots:' .. tenant end

local function charges_key(tenant) return ROOT .. 'charges:' .. tenant end

local function buckets_key(tenant) return ROOT .. 'buckets:' .. tenant end

local MINUTE = 60 * 1000000

-- Return the time in µs in which a bucket refills by `amount`.
local function cost(amount, a_minute) return math.floor(amount * MINUTE / a_minute) end

-- Let the slots and charges of a tenant expire after the last lease, when no request holds them.
local function keep_slots(tenant, lease)
    local ms = digits(math.ceil(lease / 1000) + 1000)
    redis.call('PEXPIRE', slots_key(tenant), ms)
    redis.call('PEXPIRE', charges_key(tenant), ms)
end
