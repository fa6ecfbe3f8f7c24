-- Which of the clusters that share a key serves clients: answers its key_prefix, and keeps it for a while if it is
-- the caller, who becomes it where there is none, or by taking over.
-- KEYS[1]: the shared key. ARGV: the caller's key_prefix, how long it stays active in ms, 1 to take over

local own, stays_ms, takes = unpack(ARGV)

local active = redis.call('GET', ROOT)
-- A server that is full refuses SET alone.
if active == own then
    redis.call('PEXPIRE', ROOT, stays_ms)
elseif not active or takes == '1' then
    active = own
    redis.call('SET', ROOT, own, 'PX', stays_ms)
end
return active
