#!/bin/bash
# A Docker engine and the images the tests use. Run it as often as you like: it does only what is not done yet.
# Images are made from the files of this machine's own Debian packages, so nothing is pulled:
#   batch-runner-test:py   bash, coreutils, procps, git, python3      (python:3.11-slim too, where there is none)
#   batch-runner-test:sh   dash and the libraries it is linked to: not one other program
#   batch-runner-test:box  busybox as /bin/sh, nothing else
#   batch-runner-test:user batch-runner-test:py with an ordinary user set
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

answers() { docker info >/dev/null 2>&1; }
has_image() { docker image inspect "$1" >/dev/null 2>&1; }

packages() { # installs those of its arguments that are missing; root on Debian or Ubuntu only
  local missing=()
  for name; do dpkg -s "$name" >/dev/null 2>&1 || missing+=("$name"); done
  [ ${#missing[@]} -eq 0 ] && return
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 && return
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

runs() { # whether a process of that name lives: one that was killed may stand there as a zombie for long
  local pid
  for pid in $(pgrep -x "$1"); do
    grep -q '^State:[[:space:]]*[^ZX]' "/proc/$pid/status" 2>/dev/null && return
  done
  return 1
}

start_engine() {
  answers && return
  command -v dockerd >/dev/null || packages docker.io
  local starts=0
  for _ in $(seq 600); do
    answers && return
    # An engine that was killed leaves these, and its successor would wait for the dead: only when none runs.
    if ! runs dockerd && [ $((starts += 1)) -le 3 ]; then
      pkill -KILL -f 'containerd --config /var/run/docker/containerd/containerd.toml' || true
      rm -f /var/run/docker.pid /var/run/docker/containerd/containerd.pid /var/run/docker/containerd/containerd.sock*
      setsid dockerd >"${TMPDIR:-/tmp}/dockerd.log" 2>&1 </dev/null 9>&- &
      sleep 0.5 # until it bears its own name
    fi
    sleep 0.1
  done
  echo "dockerd does not answer: see ${TMPDIR:-/tmp}/dockerd.log" >&2
  return 1
}

files_of() { # every file of the named packages and of what they need, documentation left out, one relative path a line
  local closure
  closure=$(apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances "$@" 2>/dev/null | grep -E '^[a-z0-9]' | sort -u)
  closure=$(dpkg-query -W -f '${db:Status-Abbrev}${binary:Package}\n' $closure 2>/dev/null | sed -n 's/^ii *//p' || true)
  dpkg-query -L $closure | grep -vE '^/usr/share/(doc|man|locale|info|lintian|bug|pixmaps)/' | sort -u |
    while read -r path; do
      if [ -L "$path" ] || [ -f "$path" ]; then
        case $path in /bin/* | /sbin/* | /lib/* | /lib64/*) path=/usr$path ;; esac
        echo "${path#/}"
      fi
    done
  for path in etc/alternatives/awk usr/bin/awk etc/nsswitch.conf etc/ld.so.conf usr/bin/which etc/alternatives/which \
    etc/ssl/certs/ca-certificates.crt; do
    if [ -e "/$path" ]; then echo "$path"; fi
  done
}

make_py() {
  packages base-files bash coreutils dash findutils grep sed gzip tar mawk hostname procps util-linux bsdutils \
    python3 ca-certificates git
  local root=$work/py
  mkdir -p "$root"/{etc,tmp,root,proc,sys,dev,run,var/tmp,usr/{bin,sbin,lib,lib64},home/agent}
  chmod 1777 "$root/tmp" "$root/var/tmp"
  for name in bin sbin lib lib64; do ln -s "usr/$name" "$root/$name"; done
  printf '%s\n' root:x:0:0:root:/root:/bin/bash nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin \
    agent:x:1000:1000::/home/agent:/bin/bash >"$root/etc/passwd"
  printf '%s\n' root:x:0: nogroup:x:65534: agent:x:1000: >"$root/etc/group"
  chown 1000:1000 "$root/home/agent"
  files_of base-files base-passwd bash coreutils dash debianutils diffutils findutils grep sed gzip tar mawk hostname \
    libc-bin procps util-linux bsdutils login passwd python3 ca-certificates git >"$work/files"
  tar -C / --no-recursion --ignore-failed-read --hard-dereference -c -T "$work/files" 2>/dev/null | tar -C "$root" -x
  ln -sf python3 "$root/usr/bin/python"
  chroot "$root" /sbin/ldconfig 2>/dev/null || true
  tar -C "$root" -c . | docker import -c 'CMD ["bash"]' -c 'ENV LANG=C.UTF-8' - "$1" >/dev/null
}

make_sh() {
  local root=$work/sh
  mkdir -p "$root/bin" "$root/tmp"
  chmod 1777 "$root/tmp"
  cp -L "$(command -v dash)" "$root/bin/sh"
  ldd "$(command -v dash)" | grep -oE '/[^ ]+' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
  done
  tar -C "$root" -c . | docker import - "$1" >/dev/null
}

make_box() {
  packages busybox-static
  local root=$work/box
  mkdir -p "$root/bin"
  cp -L /bin/busybox "$root/bin/sh"
  tar -C "$root" -c . | docker import - "$1" >/dev/null
}

make_user() {
  local container
  container=$(docker create batch-runner-test:py true)
  docker commit -c 'USER agent' -c 'ENTRYPOINT ["/bin/false"]' "$container" "$1" >/dev/null
  docker rm "$container" >/dev/null
}

exec 9>"${TMPDIR:-/tmp}/batch-runner-engine.lock"
flock 9
start_engine
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for kind in py sh box user; do
  has_image "batch-runner-test:$kind" || "make_$kind" "batch-runner-test:$kind"
done
has_image python:3.11-slim || docker tag batch-runner-test:py python:3.11-slim
