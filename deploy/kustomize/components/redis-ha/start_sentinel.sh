#!/bin/sh
# Starts the Sentinel of one pod. It writes what it learns to its file, so the file is made only once.
#
# Usage: start_sentinel.sh SELF FIRST DIRECTORY SERVER OPTIONS...
set -eu
self=$1 first=$2 directory=$3 server=$4
shift 4
file=$directory/sentinel.conf
if [ ! -f "$file" ]; then
    cat > "$file.new" << END
port 26379
dir $directory
protected-mode no
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $self
sentinel monitor pagestream $first 6379 2
sentinel auth-user pagestream sentinel
sentinel auth-pass pagestream none
sentinel down-after-milliseconds pagestream 2000
sentinel failover-timeout pagestream 10000
END
    mv "$file.new" "$file"
fi
exec "$server" "$file" --sentinel "$@"
