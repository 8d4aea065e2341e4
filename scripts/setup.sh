#!/bin/sh
# Sets up .venv from uv.lock, with the uv on PATH or one that pip fetches. Run by make before every target; returns at
# once when there is nothing to do. What cannot work is refused before any download, with the remedy.
#
#   PYTHON=python3.12 scripts/setup.sh    use this interpreter instead of the first suitable one on PATH
#   TORCH=installed scripts/setup.sh      make .venv anew around the torch and torchvision that this interpreter has
#   TORCH=cu126 scripts/setup.sh          make it anew with PyTorch's wheels for CUDA 12.6, or cpu; locked: as usual
set -eu
uv_version=0.13.8 # fetched where there is no uv on PATH, or one before 0.11, which cannot read pyproject.toml
disk_gigabytes=8  # .venv takes 6, the rest is headroom while packages are unpacked
size="3.3 GB to download (PyTorch brings its CUDA libraries), 6 GB on disk"
tested="2.11 and 2.15"

cd "$(dirname "$0")/.."
stamp=.venv/.set-up
without=.boot/torch # with another torch than the locked one: what uv then leaves out, also where .venv is lost
locked() { pwd -P && cksum uv.lock pyproject.toml; }
if [ -z "${PYTHON:-}${TORCH:-}" ] && [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(locked)" ]; then exit 0; fi

say() { printf 'setup: %s\n' "$*" >&2; }
stop() { say "$*" && exit 1; }
system="$(uname -s) on $(uname -m)"
case $system in
  "Linux on x86_64" | "Linux on aarch64") ;;
  *) stop "PyTorch's locked builds are for Linux on x86_64 or aarch64, and this is $system: use such a machine, a container or WSL 2." ;;
esac

# A name on PATH proves nothing (pyenv puts python3.12 there without having one), so it is run.
probe='
import sys
found = (sys.implementation.name, *sys.version_info[:2])
sys.exit(None if ("cpython", 3, 11) <= found <= ("cpython", 3, 13) else "it is %s %d.%d" % found)
'
python=
reason=
if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.13 python3.12 python3.11; fi
for name; do
  if said=$("$name" -c "$probe" 2>&1); then python=$(command -v "$name") && break; fi
  if [ "$name" = "$1" ]; then reason="$name: $(printf '%s' "$said" | tail -n 1)"; fi
done
[ -n "$python" ] || stop "no usable Python ($reason): install CPython 3.11, 3.12 or 3.13, or name one with PYTHON=/path/to/python3."

case ${TORCH:-} in
  "" | installed | locked | cpu | cu[0-9]*) ;;
  *) stop "TORCH is $TORCH: give installed, cu126 or another version of CUDA, cpu, or locked." ;;
esac

if [ "${TORCH:-}" = installed ]; then
  look='
from importlib import metadata, util
from pathlib import Path
specs = [util.find_spec(name) for name in ("torch", "torchvision")]
if None in specs or tuple(map(int, metadata.version("torch").split(".")[:2])) < (2, 11):
    raise SystemExit("it has torch " + metadata.version("torch") + ", and torchvision: " + str(None not in specs))
print(*{str(Path(spec.origin).parents[1]) for spec in specs}, sep="\n")
'
  folders=$("$python" -c "$look" 2>&1) || stop "TORCH=installed needs torch 2.11 or newer, and torchvision, in $python" \
    "($(printf '%s' "$folders" | tail -n 1)): load their module, or name the Python that has them with PYTHON."
  disk_gigabytes=3
fi

uv=$(command -v uv) || uv=
case $("${uv:-false}" --version 2>/dev/null) in "" | "uv 0."[0-9].* | "uv 0.10."*) uv= ;; esac
own=$(pwd -P)/.boot/uv-$uv_version
if [ -z "$uv" ] && [ ! -x "$own/bin/uv" ] && ! "$python" -c 'import pip' 2>/dev/null; then
  stop "$python has no pip and there is no uv on PATH: install pip (Debian, Ubuntu: apt install python3-pip) or uv."
fi

case ${TORCH:-} in
  "") leave_out=$(cat "$without" 2>/dev/null) || leave_out= ;;
  locked) leave_out= ;;
  *) leave_out=$(sed -nE '/"nvidia-ml-py"/d; s/^name = "((nvidia|cuda)-.*|triton|torch|torchvision)"/--no-install-package \1/p' uv.lock) ;;
esac
# Scripts in .venv/bin contain its path, so a moved or copied checkout needs a new one.
if [ -n "${TORCH:-}" ] || { [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" != "$(pwd -P)" ]; }; then rm -rf .venv; fi
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 976562) }')
if [ ! -x .venv/bin/python ] && [ "$free" -lt "$disk_gigabytes" ]; then
  stop "$(pwd) has $free GB of free disk space and set-up needs $disk_gigabytes GB: free some, or move the checkout to a larger disk."
fi

again="check the network, or set HTTPS_PROXY or an index of packages, and run it again; what has been downloaded is kept."
mkdir -p .boot
printf '%s\n' "$leave_out" >"$without"
if [ -z "$uv" ] && [ ! -x "$own/bin/uv" ]; then
  say "downloading uv $uv_version, the installer (25 MB)"
  PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$python" -m pip install --quiet --target "$own" "uv==$uv_version" || stop "uv could not be downloaded: $again"
fi
ln -sfn "${uv:-$own/bin/uv}" .boot/uv

unset VIRTUAL_ENV UV_PROJECT_ENVIRONMENT
# Each rank, kernel and fork server imports torch: from sources that takes twice as long, where nothing may write caches.
export UV_PYTHON_DOWNLOADS=never UV_COMPILE_BYTECODE=1
[ -w "${HOME:-/}" ] || export UV_CACHE_DIR="${UV_CACHE_DIR:-$(pwd)/.boot/cache}"
# shellcheck disable=SC2086 # words
set -- sync --frozen ${leave_out:+--inexact} $leave_out
# The interpreter of an environment that works stays, whatever else is on PATH.
if [ -n "${PYTHON:-}" ] || ! .venv/bin/python -c "$probe" 2>/dev/null; then set -- "$@" --python "$python"; fi
# First from what is on disk already: after a small change of pyproject.toml there is nothing to download.
if ! .boot/uv "$@" --offline --quiet 2>/dev/null; then
  say "installing the packages of uv.lock into .venv: ${leave_out:+without torch, at most }$size, this once"
  .boot/uv "$@" || stop "the installation failed: $again"
fi
case ${TORCH:-} in
  "" | locked) ;;
  installed) printf '%s\n' "$folders" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth" ;;
  *) .boot/uv pip install --torch-backend "$TORCH" 'torch>=2.11' torchvision || stop "torch for $TORCH was not installed: $again" ;;
esac
if [ -n "$leave_out" ]; then
  torch=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) ||
    stop ".venv was made anew, as after a move, and its torch was not the locked one: give TORCH=... as then, or TORCH=locked."
  say "torch is $torch; the lab is tested with $tested"
fi
locked >"$stamp"
say "ready: .venv has $(.venv/bin/python --version)"
