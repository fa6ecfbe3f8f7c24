-- -> queued. Answers created, known, or conflict: the id is taken by another body.
-- ARGV: id, gateway, timeout in µs or '', max_tokens, n, 1 if it has log probabilities else 0, body,
--       request, call, unfinished_ms

local id, gateway, timeout, max_tokens, n, logprobs, body, request, call, unfinished_ms = unpack(ARGV)

local function create()
    local arrived = now()
    redis.call('HSET', request_key(id),
        'state', 'queued', 'gateway', gateway, 'arrived', digits(arrived),
        'worker', '', 'epoch', '0', 'attempts', 0, 'losses', 0,
        'finishes', ('-'):rep(n), 'error_slug', '', 'error_message', '',
        'body', body, 'request', request, 'max_tokens', max_tokens, 'call', call,
        'logprobs', logprobs,
        'deadline', timeout == '' and '' or digits(arrived + timeout))
    -- Empty, so that each has its time to live before the first append.
    local keys = all_keys(id)
    for i = 2, #keys do redis.call('SET', keys[i], '') end
    own(id, gateway)
    keep_for(id, unfinished_ms)
end

local known_body, known_call = unpack(redis.call('HMGET', request_key(id), 'body', 'call'))
if not known_body then
    create()
    return {'created', entry(id)}
elseif known_body ~= body then
    return {'conflict'}
end
-- The same call again: its answer was lost.
return {known_call == call and 'created' or 'known', entry(id)}
