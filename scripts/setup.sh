#!/bin/sh
# Sets up .venv from uv.lock. Run by make before every target; returns at once when there is nothing to do.
# Every check that can fail comes before the first download, and fails with one sentence that names the remedy.
#
#   PYTHON=python3.12 scripts/setup.sh    use this interpreter instead of the first suitable one on PATH
set -eu

uv_version=0.13.8       # downloaded when there is no uv on PATH
uv_oldest=0.11.0        # an older uv on PATH is passed over: it cannot read pyproject.toml
disk_gigabytes=8        # .venv takes 6, the rest is headroom while packages are unpacked

cd "$(dirname "$0")/.."
checkout=$(pwd -P)
stamp=.venv/.set-up

say() { printf 'setup: %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

# Scripts in .venv/bin contain its path, so a moved or copied checkout needs a new one; another name for this one does not.
is_moved() { [ -f "$stamp" ] && ! [ "$(head -n 1 "$stamp")/uv.lock" -ef uv.lock ]; }
locked() { cksum uv.lock pyproject.toml; }
is_current() { [ -x .venv/bin/python ] && [ -f "$stamp" ] && ! is_moved && [ "$(tail -n +2 "$stamp")" = "$(locked)" ]; }

if [ -z "${PYTHON:-}" ] && is_current; then exit 0; fi

# --- checks: nothing is downloaded or written before all have passed ---------------------------------------------

system=$(uname -s)
[ "$system" = Linux ] || stop "this lab runs on Linux only, and this is $system: use a Linux machine, container or WSL 2."
machine=$(uname -m)
case $machine in
  x86_64 | aarch64) ;;
  *) stop "PyTorch publishes no Linux build for this processor ($machine): use an x86_64 or aarch64 machine." ;;
esac

# Prints "3.12 /usr/bin/python3.12" for an interpreter that the locked packages have builds for, and fails otherwise.
# A name on PATH proves nothing (pyenv puts python3.12 there without having one), so it is run.
# shellcheck disable=SC2016
probe='
import os, sys
version = "%d.%d" % sys.version_info[:2]
libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").split() if "CS_GNU_LIBC_VERSION" in os.confstr_names else []
if sys.implementation.name != "cpython":
    sys.exit("it is %s, not CPython" % sys.implementation.name)
if version not in ("3.11", "3.12", "3.13"):
    sys.exit("it is Python %s" % version)
if len(libc) != 2 or tuple(int(n) for n in libc[1].split(".")[:2]) < (2, 28):
    sys.exit("its C library is not glibc 2.28 or newer")
print(version, sys.executable)
'
python=
if [ -n "${PYTHON:-}" ]; then
  found=$("$PYTHON" -c "$probe" 2>&1) || stop "PYTHON=$PYTHON cannot be used ($(printf '%s' "$found" | tail -n 1)): name a CPython 3.11, 3.12 or 3.13 with glibc 2.28 or newer."
else
  first_reason=
  for name in python3 python3.13 python3.12 python3.11; do
    command -v "$name" >/dev/null 2>&1 || continue
    if found=$("$name" -c "$probe" 2>&1); then break; fi
    [ -n "$first_reason" ] || first_reason="$name on PATH: $(printf '%s' "$found" | tail -n 1)"
    found=
  done
  [ -n "${found:-}" ] || stop "no usable Python (${first_reason:-there is no python3 on PATH}): install Python 3.11, 3.12 or 3.13, or name one with PYTHON=/path/to/python3."
fi
version=${found%% *}
python=${found#* }

# True when $1 is at least $2; both are dotted numbers.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }
uv=
if on_path=$(uv --version 2>/dev/null); then
  on_path=${on_path#uv }
  if at_least "${on_path%% *}" "$uv_oldest"; then uv=$(command -v uv); fi
fi
own_uv=$checkout/.boot/uv-$uv_version/bin/uv
if [ -z "$uv" ] && [ -x "$own_uv" ]; then uv=$own_uv; fi
if [ -z "$uv" ] && ! "$python" -c 'import pip' 2>/dev/null; then
  stop "$python has no pip and there is no uv on PATH: install pip (Debian, Ubuntu: apt install python3-pip) or uv."
fi

# What exists already of a path that set-up will create.
existing() { path=$1; while [ ! -e "$path" ]; do path=$(dirname "$path"); done; printf '%s\n' "$path"; }
cache=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/uv}
cache_parent=$(existing "$cache")
if [ ! -d "$cache_parent" ] || [ ! -w "$cache_parent" ]; then cache=$checkout/.boot/cache; fi
export UV_CACHE_DIR="$cache"
[ -w "$checkout" ] || stop "no permission to write in $checkout: clone the repository to a folder of your own."

free_gigabytes() { df -Pk "$1" | awk 'NR == 2 { printf "%d\n", $4 / 1e6 * 1.024 }'; }
file_system() { df -Pk "$1" | awk 'NR == 2 { print $1, $6 }'; }
check_disk() {
  for folder in "$checkout" "$(existing "$cache")"; do
    free=$(free_gigabytes "$folder")
    [ "$free" -ge "$disk_gigabytes" ] || stop "$folder has $free GB of free disk space and set-up needs $disk_gigabytes GB there: free some, or move $([ "$folder" = "$checkout" ] && echo "the checkout" || echo "uv's cache with UV_CACHE_DIR=...") to a larger disk."
  done
}
# uv fills .venv with hard links into its cache; across file systems it has to copy, and would warn about it.
if [ "$(file_system "$checkout")" != "$(file_system "$(existing "$cache")")" ]; then export UV_LINK_MODE=copy; fi

# An existing environment is brought up to date, mostly without a download: see below.
if [ ! -x .venv/bin/python ] || is_moved; then check_disk; fi

# --- work ----------------------------------------------------------------------------------------------------------

mkdir -p .boot
if command -v flock >/dev/null 2>&1; then
  exec 9>.boot/lock
  flock -n 9 || { say "waiting for another set-up of this checkout to finish"; flock 9; }
  if [ -z "${PYTHON:-}" ] && is_current; then exit 0; fi
fi

unset VIRTUAL_ENV UV_PROJECT_ENVIRONMENT
export UV_PYTHON_DOWNLOADS=never
# Each rank, kernel and fork server imports torch: from sources that takes twice as long, where nothing may write caches.
export UV_COMPILE_BYTECODE=1

# Prints the host of a package index if nothing answers there; any answer will do. No password in the address is shown.
# shellcheck disable=SC2016
silent='
import ssl, sys, urllib.error, urllib.parse
url = urllib.parse.urlsplit(sys.argv[-1])
host = url.netloc.rpartition("@")[2]
try:
    import urllib.request
    if url.scheme in ("http", "https"):
        urllib.request.urlopen(url._replace(netloc=host).geturl(), timeout=15)
except Exception as error:
    if not isinstance(error, urllib.error.HTTPError) and not isinstance(getattr(error, "reason", None), ssl.SSLError):
        print(host)
'
stop_after_failure() {  # $1: what failed; $2: the package index it asked; $3: a file with its messages, if they have not been shown
  if [ -n "${3:-}" ]; then
    tail -n 15 "$3" >&2
    say "the whole log is $checkout/$3"
  fi
  host=$("$python" -c "$silent" "$2" 2>/dev/null) || host=
  [ -z "$host" ] || stop "$1 failed because the package index ($host) cannot be reached from here: check the network or set HTTPS_PROXY, and run it again; what has been downloaded is kept."
  stop "$1 failed for the reason printed above: mend that and run it again; what has been downloaded is kept."
}

pip_index() {
  echo "${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)}"
}
if [ -z "$uv" ]; then
  say "downloading uv $uv_version, the installer (25 MB)"
  rm -rf .boot/uv-*
  new=.boot/new-uv.$$
  trap 'rm -rf "$new"' EXIT
  trap 'exit 130' INT TERM
  PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$python" -m pip install --quiet --target "$new" "uv==$uv_version" >.boot/pip.log 2>&1 \
    || stop_after_failure "the download of uv" "$(pip_index)" .boot/pip.log
  mv "$new" ".boot/uv-$uv_version"
  uv=$own_uv
fi
ln -sfn "$uv" .boot/uv

# A terminal gets uv's progress bars; a log gets one line for each large download, without the 170 packages at the end.
install() {
  if [ -t 2 ]; then "$uv" "$@"; return; fi
  rm -f .boot/failed
  { "$uv" "$@" 2>&1 || : >.boot/failed; } | grep -v '^ [-+~] ' >&2 || true
  if [ -e .boot/failed ]; then rm .boot/failed; return 1; fi
}

if is_moved; then rm -rf .venv; fi

# The interpreter of an environment that works stays, whatever else is on PATH.
set -- sync --frozen
if [ -n "${PYTHON:-}" ] || ! .venv/bin/python -c "$probe" >/dev/null 2>&1; then set -- "$@" --python "$python"; fi

# First from what is on disk already: after a small change of pyproject.toml there is nothing to download.
if ! "$uv" "$@" --offline --quiet 2>/dev/null; then
  check_disk
  say "installing the packages of uv.lock for Python $version into .venv: 3.3 GB to download (PyTorch brings its CUDA libraries) and 6 GB on disk, this once"
  install "$@" || stop_after_failure "the installation" https://files.pythonhosted.org  # as in uv.lock, whatever is configured
fi
{ printf '%s\n' "$checkout"; locked; } >"$stamp"
say "ready: .venv has Python $(.venv/bin/python -c 'import platform; print(platform.python_version())')"
