-- Where the time of final requests went, told once more by who had them to their ends. One that is not
-- final, another gateway's, or another one under the same id stays as it is, and so does what is not known.
-- ARGV: for each request its id, gateway, arrival in µs, explanation

for i = 1, #ARGV, 4 do
    local id, gateway, arrived, explanation = unpack(ARGV, i, i + 3)
    local state, its_gateway, its_arrival = unpack(redis.call(
        'HMGET', request_key(id), 'state', 'gateway', 'arrived'))
    if is_final(state) and its_gateway == gateway and its_arrival == arrived then
        explain(id, explanation)
    end
end
return {'ok'}
