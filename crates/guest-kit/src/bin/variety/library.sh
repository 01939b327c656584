# Words for the steps of a case. The host has set DISK, MOUNT (and REST, its options but the mode), MIX (options of the workers),
# LOOSE (of the look at what they left), SEED, BACKUP and BACKUP_STREAMS. Where the shell has a program of its own by the name of
# one of e2fsprogs', that is called by its path.

# The workers that run: pid, name and seed a line. All that were started and whose work has to be there: name and seed.
: >/tmp/working; : >/tmp/started
number=0

# said FILE: its last words.
said() { tail -n 2 "$1" | tr '\n' ' '; }
last_words() { dmesg | grep -E "JBD2|EXT4|Buffer I.O" | tail -n 8 | tr "\n" " "; }
# cannot WHY: this cannot be tried here.
cannot() { mark cannot "$@"; sleep 1000; }
# bad lost|damaged WHAT: a finding. The first ends it, as what follows is of little worth.
bad() { mark bad "$@"; sleep 1000; }

# Whether it could be mounted; and what ext4 says when it leaves orphans to a full check, which is no loss of the disk's.
up() {
    mount $MOUNT $DISK /mnt 2>/tmp/mount.err; mounted=$?
    dmesg | grep -q 'Errors on filesystem, clearing orphan list' && mark orphans forgotten
    return $mounted
}

# One more worker, in a directory of its own.
start() {
    number=$((number + 1)); name=w$number; seed=$((SEED + number))
    guest-tools mix --directory /mnt/$name --seed $seed --stream $name --acknowledged /tmp/acked.$name --forever $MIX 2>/tmp/$name.err &
    echo "$! $name $seed" >>/tmp/working
    echo "$name $seed" >>/tmp/started
}
next() { start; start; }

# settle [N]: until every worker is N operations further.
settle() {
    while read -r pid name seed; do
        was=$(cat /tmp/acked.$name 2>/dev/null)
        tries=0
        until now=$(cat /tmp/acked.$name 2>/dev/null); [ "${now:-0}" -ge $((${was:-0} + ${1:-60})) ]; do
            kill -0 $pid 2>/dev/null || bad damaged worker $name has ended: $(cat /tmp/$name.err)
            tries=$((tries + 1)); [ $tries -lt 900 ] || bad damaged worker $name stands still at ${now:-nothing}: $(last_words)
            sleep 0.1
        done
    done </tmp/working
}

stop() {
    while read -r pid name seed; do kill $pid 2>/dev/null; wait $pid 2>/dev/null; done </tmp/working
    : >/tmp/working
}

verify_all() {
    while read -r name seed; do
        guest-tools verify --directory /mnt/$name --seed $seed --acknowledged $(cat /tmp/acked.$name 2>/dev/null) $LOOSE \
            2>/tmp/verify.err || bad lost $name after the mount in the same guest: $(head -c 400 /tmp/verify.err)
    done </tmp/started
}

forget() { : >/tmp/started; }

# Unmounted, mounted and looked at; then new workers begin.
again() {
    stop
    tries=0
    until umount /mnt 2>/tmp/out; do
        tries=$((tries + 1)); [ $tries -lt 20 ] || bad damaged cannot be unmounted: $(said /tmp/out)
        sleep 0.2
    done
    up || bad damaged cannot be mounted again: $(said /tmp/mount.err) $(last_words)
    verify_all
    next
}

# What the backup has to have; its numbers are the host's.
restored() {
    forget
    up || bad damaged the restored one cannot be mounted: $(said /tmp/mount.err) $(last_words)
    for entry in $BACKUP_STREAMS; do
        IFS=: read -r name seed acked <<EOF
$entry
EOF
        echo "$acked" >/tmp/acked.$name
        echo "$name $seed" >>/tmp/started
    done
    verify_all
    number=10
}

# The ioctl EXT4_IOC_SHUTDOWN: 0 everything written, 1 the log flushed, 2 nothing.
shutdown_flavour() {
    : >/mnt/flavour
    perl -e 'open(my $f, "<", "/mnt/flavour") or die; my $n = pack("L", $ARGV[0]); ioctl($f, 0x8004587d, $n) or die $!' $1 ||
        cannot the shutdown ioctl
}
