"""The shell scripts of `swe.patch`, for any POSIX shell: each a step on the private git directory, run in a sandbox.

Each has nothing but PATH, git's own settings and these variables; what it finds it writes into files of $T,
where `swe.patch` reads it. FOLDER comes before there are any.

T   the folder of this patch, outside of the working tree; $T/git is the private git directory
W   the working tree: the top of the repository that the agent works in
K   the folder of what was kept before the agent came, else /dev/null
R   the commits that the patch may be against, separated by blanks, the first to be had wins
B   the tree that it is against: what was kept, then what OPEN (and after it DROP, KEEP) wrote to $T/base
M   bytes that a patch, or an untracked file in one, may have
Q   git's core.quotePath: "true" writes file names in ASCII

Arguments are pathspecs or file names. Code 0 is success, NO_BASE and ONLY_HERE are told apart, any other is a failure
which the output says in words.
"""

NO_BASE = 3
"""Of OPEN: the repository has none of the commits."""

ONLY_HERE = 6
"""Of CHECK: the patch applies to $B, but to none of the commits."""

CONFIGURATION = b"""\
[core]
	autocrlf = false
	safecrlf = false
	untrackedCache = false
	pager = cat
[gc]
	auto = 0
[safe]
	directory = *
"""

FOLDER = """\
w={cwd}
[ -d "$w" ] || [ -z {kept} ] || {{ rm -f -- "$w" && mkdir -p -- "$w" && echo {gone}; }} || exit
cd -- "$w" && pwd -P || exit
case ${{TMPDIR:-/tmp}} in /tmp) d=/var/tmp;; *) d=$TMPDIR;; esac
for d in "$d" /tmp /var/tmp /dev/shm; do {{ mkdir -p -- "$d" && mktemp -d -p "$d"; }} 2>/dev/null && exit; done
echo 'no place for temporary files'; exit 1"""
"""The working tree and a new folder. The sandbox's /tmp is what an agent is most likely to clear away."""

FUNCTIONS = b"""\
files_only() {
  find "$@" ! -type d ! -type f -exec sh -c 'for f; do
    if [ -p "$f" ] || [ -b "$f" ] || { [ -c "$f" ] && [ ! "$f" -ef /dev/null ]; }; then
      rm -f -- "$f" || { chmod u+wx "${f%/*}" && rm -f -- "$f"; }
    fi
  done' sh {} + 2>/dev/null
}
pointed() {
  [ -f "$1/.git" ] || return 0
  (cd -- "$1" && x=$(sed -n 's/^gitdir: //p' .git) && [ -e "$x/HEAD" ] && cd -- "$x" || exit
  files_only .
  [ ! -f commondir ] || { cd -- "$(cat commondir)" && files_only .; }) 2>/dev/null
}
status() (
  unset GIT_DIR GIT_WORK_TREE
  cd -- "$1" && shift && git --git-dir=.git --no-optional-locks -c core.fsmonitor=false "$@" --ignore-submodules=none
)
"""
"""Of every script. `files_only` removes what is no file, `pointed` does so in the git directory that a `.git` which is
a file names; `status` asks a submodule's own repository."""

OPEN = b"""\
cd -- "$W" || exit
files_only . -path ./.git -prune -o \\( -name '.git*' -o -path '*/.git/*' \\)
D=.git C=.git P=
if [ -f .git ]; then
  pointed .
  if x=$(git --git-dir=.git rev-parse --absolute-git-dir 2>&1); then
    D=$x C=$(git --git-dir=.git rev-parse --git-common-dir) || exit
  else P=$x; fi
elif [ -d .git ]; then files_only .git/
else P="the repository is gone: there is no .git in $W"
fi
[ ! -d "$K" ] || files_only "$K"
[ -d "$C/objects" ] || P=${P:-the repository is broken: it has no objects}
git init -q --bare --template= "$T/git" && mkdir -p "$T/git/info" "$T/git/objects/info" || exit
for o in "$K/git/objects" "$C/objects"; do
  [ ! -d "$o" ] || (cd -- "$o" && pwd -P)
done >"$T/git/objects/info/alternates"
for f in "$K/git/info/exclude" "$C/info/exclude"; do [ ! -f "$f" ] || { cat "$f"; echo; }; done >"$T/git/info/exclude"
[ ! -f "$D/index" ] || cp -p "$D/index" "$T/git/theirs"
export GIT_DIR="$T/git" GIT_WORK_TREE="$W"
for c in $R; do git rev-parse -q --verify "$c^{tree}"; done >"$T/bases" 2>/dev/null
read -r F <"$T/bases" || { echo "${P:-commit ${R%% *} is not in the repository}"; exit 3; }
git cat-file -e "$B" 2>/dev/null || B=$F
echo "$B" >"$T/base"
git diff-tree -r -z --name-only --no-renames --diff-filter=A "$F" "$B" >"$T/made" || exit
cp -p "$T/git/theirs" "$T/git/index" 2>/dev/null
git ls-files -v 2>/dev/null >"$T/marked" && ! grep -q '^[a-zS]' "$T/marked" && git read-tree --reset "$B" 2>/dev/null ||
  { rm -f "$T/git/index" && git read-tree "$B"; } || exit
GIT_INDEX_FILE=$T/git/theirs git diff-index --cached --raw -z --no-abbrev --no-renames --ignore-submodules=none \\
  "$B" >"$T/theirs" 2>/dev/null
[ ! -f .gitmodules ] ||
  git config -z -f .gitmodules --get-regexp '^submodule\\..*\\.path$' >"$T/declared" 2>/dev/null
find . -name .git -prune -o -type f -size +"$M"c -print0 >"$T/large" 2>/dev/null
: >>"$T/declared"
git ls-files -s -z | grep -z '^160000 ' >"$T/links"
exit 0
"""
"""What the patch is against in the index (the tree that was there before, else that of the first commit to be had),
then lists: what had been made before, what the agent's index adds, submodules, large files.

The index keeps what the agent's knows of unchanged files, for speed, unless that one hides files from git; copied with
its time, by which git knows what may have changed since."""

BROKEN = b"""\
cd -- "$W" || exit
for p; do
  [ ! -L "$p" ] || continue
  [ -e "$p/.git" ] || [ -L "$p/.git" ] || continue
  [ ! -d "$p/.git" ] || files_only "$p/.git/"
  pointed "$p"
  status "$p" status --porcelain >/dev/null 2>&1 || printf '%s\\0' "$p"
done >"$T/broken"
"""
"""Which of the submodules have a repository that git cannot read: for one such it would add nothing at all."""

RECEIVE = "git --git-dir={folder}/git index-pack --stdin"

TRACK = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
git update-index -z --index-info <"$T/tracked" || exit
git update-index -q --refresh >/dev/null 2>&1
git ls-files -z --others --exclude-standard >"$T/others"
"""
"""The refresh compares contents, so that only what differs is written as an object later."""

ADD = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
find . -name .git -prune -o ! -type d ! -type f ! -type l -print0 2>/dev/null |
  git update-index --force-remove -z --stdin || exit
git add -A --ignore-errors -- . "$@" 2>&1
c=$?
git ls-files -s -z | grep -z '^160000 ' >"$T/links"
exit $c
"""
"""What is no file any more (a named pipe) was one that is deleted: git would refuse to add it."""

UNTRACK = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
git update-index --force-remove -z --stdin <"$T/untracked"
"""

LINKED = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
for p; do
  [ -d "$p" ] || continue
  if [ ! -e "$p/.git" ]; then new=$(ls -A -- "$p")
  elif c=$(git rev-parse ":$p") && [ "$c" != "$(git rev-parse -q --verify "$B:$p")" ]; then
    new=$(unset GIT_DIR GIT_WORK_TREE; git -c core.fsmonitor=false -C "$p" rev-list -n 1 "$c" --not --remotes 2>&1)
  else new=
  fi
  new=$new$(status "$p" status --porcelain 2>/dev/null)
  [ -n "$new" ] || continue
  x=$({ echo "$new"; status "$p" diff --no-ext-diff HEAD 2>/dev/null; } | git hash-object --stdin)
  printf '%s %s\\0' "$x" "$p"
done >"$T/apart"
"""
"""Which of the submodules hold what no link to a commit gives: files without a repository, commits of no remote,
what is in no commit. Each with a word that is another one as soon as that is something else."""

KEEP = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
t=$(git write-tree --missing-ok) && echo "$t" >"$T/base" || exit
o=$T/git/objects
read -r O <"$o/info/alternates"
{ [ "$(stat -f -c %T "$O")" != overlayfs ] && [ ! -e "$O/info/alternates" ] && cp -alf "$O/." "$o"; } 2>/dev/null ||
  { cat "$T/bases"; echo "$t"; } | git pack-objects -q --revs --window=0 --threads=1 "$o/pack/pack" >/dev/null
rm -f "$o/info/alternates" "$T/git/index" "$T/git/theirs" "$T/others" "$T/marked"
"""
"""Hard links cost nothing, but on an overlay each would copy its file out of the image: there it is a pack of what the
working tree is made of, without its history."""

DROP = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
git update-index --force-remove -z --stdin <"$T/dropped" || exit
export GIT_INDEX_FILE="$T/git/before"
git read-tree "$B" && git update-index --force-remove -z --stdin <"$T/dropped" && git write-tree --missing-ok >"$T/base"
"""

DIFF = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
d() { git -c core.quotePath="$Q" diff --cached --no-color --no-ext-diff --no-renames --ignore-submodules=none "$@"; }
d --raw -z --no-abbrev "$B" -- . "$@" >"$T/changed" || exit
{ d --binary --full-index --no-textconv --src-prefix=a/ --dst-prefix=b/ "$B" -- . "$@"; echo $? >"$T/code"; } |
  { head -c "$M" >"$T/patch" && wc -c >"$T/over"; }
read -r c <"$T/code" && [ -s "$T/over" ] && exit "$c"
exit 1
"""

SIZES = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
git cat-file --batch-check='%(objectsize) %(objectsize:disk)' <"$T/ids" >"$T/sizes" &&
git diff --cached --numstat -z --no-ext-diff --no-renames --ignore-submodules=none "$B" >"$T/lines"
"""

CHECK = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
[ -s "$T/patch" ] || exit 0
applied() (
  export GIT_INDEX_FILE="$T/git/clean"
  git read-tree "$1" && git apply --cached --whitespace=nowarn "$T/patch" 1>&2 && git write-tree --missing-ok
)
t=$(applied "$B" 2>"$T/said") || { cat "$T/said"; exit 5; }
git diff --cached --quiet --no-renames --ignore-submodules=none "$t" -- . "$@" ||
  { echo "applied, it gives other files than those it was taken from"; exit 5; }
while read -r c; do said=$(applied "$c" 2>&1 </dev/null) && exit 0; done <"$T/bases"
echo "$said"
exit 6
"""
