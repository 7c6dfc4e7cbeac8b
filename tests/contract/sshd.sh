#!/bin/bash
# An SSH server of our own on loopback, for as long as its stdin is open: sshd.sh FOLDER [guest]
# Keys, settings, log and the hosts' temporary folder are in FOLDER, which must not be there yet; at the end it is removed.
# Prints `ready PORT USER`. `guest`, for root only: an ordinary user that only this server sees can log in instead.
# SSHD_OPTIONS are further lines of its settings.
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive PATH=$PATH:/usr/sbin:/sbin
folder=$1 kind=${2-own}

missing=()
for name in sshd ssh-keygen; do command -v "$name" >/dev/null || missing=(openssh-server openssh-client); done
if [ ${#missing[@]} -gt 0 ]; then
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; }
fi

mkdir -m 711 -p "$folder"
mkdir -m 1777 "$folder/tmp"
[ "$(id -u)" != 0 ] || mkdir -p /run/sshd
for key in host id stranger; do ssh-keygen -q -t ed25519 -N '' -f "$folder/$key" </dev/null; done
ssh-keygen -q -t ed25519 -N 'a few words' -f "$folder/locked" </dev/null
cp "$folder/id.pub" "$folder/authorized"
chmod 644 "$folder/authorized"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
echo "[127.0.0.1]:$port $(cat "$folder/host.pub")" >"$folder/known"
echo "[127.0.0.1]:$port $(cat "$folder/stranger.pub")" >"$folder/changed"
: >"$folder/empty"
# A shell that sshd starts reads root's ~/.bashrc, unless it is some shell's child: whatever is in there is not ours.
cat >"$folder/config" <<END
Port $port
ListenAddress 127.0.0.1
HostKey $folder/host
PidFile $folder/pid
AuthorizedKeysFile $folder/authorized
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
PrintMotd no
SetEnv TMPDIR=$folder/tmp SHLVL=1
${SSHD_OPTIONS-}
END

server=("$(command -v sshd)" -D -f "$folder/config" -E "$folder/log")
user=$(id -un)
if [ "$kind" = guest ]; then
  user=guest
  { cat /etc/passwd; echo "guest:x:12345:12345::$folder/tmp:/bin/sh"; } >"$folder/passwd"
  unshare --mount sh -c 'mount --bind "$1" /etc/passwd && shift && exec "$@"' sh "$folder/passwd" "${server[@]}" </dev/null >/dev/null 2>&1 &
else
  "${server[@]}" </dev/null >/dev/null 2>&1 &
fi
trap 'kill $! 2>/dev/null; wait $! || true; rm -rf "$folder"' EXIT
for _ in $(seq 200); do
  [ ! -s "$folder/pid" ] || break
  sleep 0.02
done
[ -s "$folder/pid" ] || { cat "$folder/log" >&2; exit 1; }
echo "ready $port $user"
cat >/dev/null
