-- Replaces the time breakdowns of final requests by those that the requests' last gateways report.
-- An item is ignored if its request is unknown, not final, owned by another gateway, or another
-- request with the same id.
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
