-- Returns the key_prefix of the active cluster: the one that serves clients, of the clusters that
-- share a key. The caller's cluster becomes the active one if there is none, or if it takes over.
-- If it is the active one, it stays so for the given time from now.
-- KEYS[1]: the shared key. ARGV: the caller's key_prefix, time in ms for which its cluster stays
-- active, 1 to take over

local own, stays_ms, takes = unpack(ARGV)

local active = redis.call('GET', ROOT)
-- A full server refuses SET, but not PEXPIRE.
if active == own then
    redis.call('PEXPIRE', ROOT, stays_ms)
elseif not active or takes == '1' then
    active = own
    redis.call('SET', ROOT, own, 'PX', stays_ms)
end
return active
