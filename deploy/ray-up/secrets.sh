#!/usr/bin/env bash
# Create the directory of secrets that `ray up` copies to every node: `secrets.sh`. To use an existing Redis or Valkey
# server as the ledger: `secrets.sh rediss://user:password@host:6379`. An existing token or password is kept.
set -euo pipefail
cd "$(dirname "$0")"
umask 077
mkdir -p secrets

new_secret() { # FILE
    local secret
    [ -s "secrets/$1" ] && return
    # A redirection of openssl's output would leave an empty file, which a rerun keeps, if openssl fails.
    secret=$(openssl rand -hex 32)
    printf %s "$secret" >"secrets/$1"
}

new_secret auth_token
if [ $# -gt 0 ]; then
    printf %s "$1" >secrets/ledger.url
else
    new_secret ledger.password
fi
