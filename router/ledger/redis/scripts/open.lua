-- -> queued, or -> queued -> running if a worker is given and the term leads. Returns created or
-- known, with the entry; conflict, if the id exists with another body; or missing, if the chunk
-- `base`, or an image without a file, is not stored.
-- ARGV: id, gateway, timeout in µs or '', max_tokens, n, 1 if the request has log probabilities
--       else 0, body, request, turn, call, unfinished_ms, session or '', base, hashes and tokens of
--       the prompt's chunks (see store_chunks), images (see unpacked_images; a file may be empty if
--       it is expected to be stored), and, to dispatch it at once, worker, epoch, term

local id, gateway, timeout, max_tokens, n, logprobs, body, request, turn, call, unfinished_ms, session, base, hashes, tokens, images, worker, epoch, term =
    unpack(ARGV)
images = unpacked_images(images)

local function open()
    local arrived = now()
    create(id, gateway, n, session, {base, hashes, tokens}, images,
        'arrived', digits(arrived), 'body', body, 'request', request, 'turn', turn,
        'max_tokens', max_tokens, 'call', call, 'logprobs', logprobs, 'moves', 1,
        'deadline', timeout == '' and '' or digits(arrived + timeout))
    list(id, digits(arrived))
    note(id, 'open', gateway)
    if worker and leads(term) then run(id, worker, epoch, 1, 2) end
    keep_for(id, unfinished_ms)
    -- Sweep two requests, so that the sweep keeps up if as many requests expire as are opened.
    sweep(2)
end

local known_body, known_call = unpack(redis.call('HMGET', request_key(id), 'body', 'call'))
local lacks_base = base ~= '' and redis.call('EXISTS', chunk_key(base)) == 0
if not known_body and (lacks_base or lacks_image(images)) then
    return {'missing'}
elseif not known_body then
    open()
    return {'created', entry(id)}
elseif known_body ~= body then
    return {'conflict'}
end
-- A call that is repeated because its answer was lost returns created, too.
return {known_call == call and 'created' or 'known', entry(id)}
