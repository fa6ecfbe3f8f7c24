#!/usr/bin/env bash
# Certificates, and two authorities of one's own that sign them:
#
#   certificates.sh DIRECTORY NAMES [CLIENT...]
#
# NAMES are those by which clients reach the routers, as openssl writes them: DNS:llm.example,IP:10.0.0.10. In DIRECTORY
#   router/          what routers show clients
#   internal/        what routers and workers show each other
#   client-CLIENT/   what a client shows routers, where they ask for it
#   authorities/     the keys that sign all that: for no machine but this one
# each with tls.crt, tls.key and ca.crt, as in a Secret of Kubernetes. Run again, it renews all but the authorities.
set -euo pipefail
umask 077
[ $# -ge 2 ] || { sed -n '2,11s/^# \?//p' "$0" >&2 && exit 2; }
names=$2
clients=("${@:3}")
mkdir -p "$1/authorities"
cd "$1"
new_key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)

authority() { # NAME
    [ -f "authorities/$1.crt" ] && return
    openssl req -x509 "${new_key[@]}" -days 3650 -subj "/CN=everlift $1" \
        -keyout "authorities/$1.key" -out "authorities/$1.crt"
}

certificate() { # AUTHORITY DIRECTORY NAMES
    local new
    new=$(mktemp -d)
    openssl req "${new_key[@]}" -subj "/CN=$2" -keyout "$new/tls.key" -out "$new/request"
    openssl x509 -req -in "$new/request" -CA "authorities/$1.crt" -CAkey "authorities/$1.key" -CAcreateserial -days 90 \
        -extfile <(echo "subjectAltName=$3") -out "$new/tls.crt"
    mkdir -p "$2"
    cp "authorities/$1.crt" "$2/ca.crt"
    mv "$new/tls.key" "$new/tls.crt" "$2"
    rm -r "$new"
}

authority clients
authority internal
certificate clients router "$names"
certificate internal internal DNS:everlift
for client in "${clients[@]}"; do certificate clients "client-$client" "DNS:$client"; done
