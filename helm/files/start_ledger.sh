# Writes the ACL file with the users and the hashes of their passwords, then executes the server.
set -eu
users=${USERS:-/run/valkey/users.acl}
hash() { printf %s "$1" | sha256sum | cut -c 1-64; }
umask 077
{
    echo "user default off"
    # Commands of routers (router/ledger/README.md), on the keys of this release, and ping for the readiness probe.
    echo "user everlift on #$(hash "$EVERLIFT_PASSWORD") ~{{ include "everlift.fullname" . }}-* resetchannels -@all" \
        +evalsha "+script|load" +info +time "+config|get" +ping \
        +get +set +getrange +setrange +append +strlen +exists +del +pexpire +pttl \
        +hget +hset +hsetnx +hmget +hgetall +hvals +hdel +hincrby +hstrlen \
        +sadd +srem +smembers +sismember +srandmember +zadd +zcount +zrange +zrangebyscore +zrem +zscore +rpush +lrange +lpop
    # Commands that Ray's head calls. It deletes the key DUMMY to find the leader of a Redis cluster.
    echo "user ray on #$(hash "$RAY_PASSWORD") ~RAY* ~DUMMY resetchannels -@all +@read +@write +@connection -@dangerous +info"
} >"$users"
unset EVERLIFT_PASSWORD RAY_PASSWORD
exec valkey-server "$@"
