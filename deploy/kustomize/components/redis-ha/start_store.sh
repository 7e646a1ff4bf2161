#!/bin/sh
# Starts the store of one pod: as the primary, if its Sentinel saw it as such last, else as a replica of the primary.
# A primary that was replaced meanwhile has no replica. Then it refuses writes (min-replicas-to-write), until the
# Sentinels make it a replica.
#
# Usage: start_store.sh SELF FIRST DIRECTORY COMMAND...
#   SELF, FIRST   this pod's name in the network, and that of the pod that begins as the primary
#   DIRECTORY     where the Sentinel's file is
set -eu
self=$1 first=$2 directory=$3
shift 3
primary=
if [ -f "$directory/sentinel.conf" ]; then
    primary=$(sed -n 's/^sentinel monitor pagestream \([^ ]*\) .*/\1/p' "$directory/sentinel.conf")
fi
primary=${primary:-$first}
set -- "$@" --dir "$directory" --replica-announce-ip "$self" --min-replicas-to-write 1 --min-replicas-max-lag 10
if [ "$primary" != "$self" ]; then
    set -- "$@" --replicaof "$primary 6379"
fi
exec "$@"
