# Writes the users with the hashes of their passwords, then becomes the server.
set -eu
users=${USERS:-/run/valkey/users.acl}
hash() { printf %s "$1" | sha256sum | cut -c 1-64; }
umask 077
{
    echo "user default off"
    # What a router calls (router/ledger/README.md), on the keys of this release; and what asks whether it is ready.
    echo "user everlift on #$(hash "$EVERLIFT_PASSWORD") ~{{ include "everlift.fullname" . }}-* resetchannels -@all" \
        +evalsha "+script|load" +info +time "+config|get" +ping \
        +get +set +getrange +setrange +append +strlen +exists +del +pexpire +pttl \
        +hget +hset +hsetnx +hmget +hgetall +hvals +hdel +hincrby +hstrlen \
        +sadd +srem +smembers +sismember +srandmember +zadd +zcount +zrange +zrangebyscore +zrem +zscore +rpush +lrange +lpop
    # What Ray's head calls. It deletes the key DUMMY to see who leads.
    echo "user ray on #$(hash "$RAY_PASSWORD") ~RAY* ~DUMMY resetchannels -@all +@read +@write +@connection -@dangerous +info"
} >"$users"
unset EVERLIFT_PASSWORD RAY_PASSWORD
exec valkey-server "$@"
