-- -> queued, or -> queued -> running with a worker and a term that leads. Answers created, known, or conflict: the id is taken by another body.
-- ARGV: id, gateway, timeout in µs or '', max_tokens, n, 1 if it has log probabilities else 0, body,
--       request, call, unfinished_ms, and, to dispatch it at once, worker, epoch, term

local id, gateway, timeout, max_tokens, n, logprobs, body, request, call, unfinished_ms, worker, epoch, term =
    unpack(ARGV)

local function open()
    local arrived = now()
    create(id, gateway, n,
        'arrived', digits(arrived), 'body', body, 'request', request, 'max_tokens', max_tokens,
        'call', call, 'logprobs', logprobs, 'moves', 1,
        'deadline', timeout == '' and '' or digits(arrived + timeout))
    list(id, digits(arrived))
    note(id, 'open', gateway)
    if worker and leads(term) then run(id, worker, epoch, 1, 2) end
    keep_for(id, unfinished_ms)
    -- One comes, and two are looked at: where as many go as come, there are no more that expired than others.
    sweep(2)
end

local known_body, known_call = unpack(redis.call('HMGET', request_key(id), 'body', 'call'))
if not known_body then
    open()
    return {'created', entry(id)}
elseif known_body ~= body then
    return {'conflict'}
end
-- The same call again: its answer was lost.
return {known_call == call and 'created' or 'known', entry(id)}
